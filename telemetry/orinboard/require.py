"""Conditions that a board has to meet before it is worth measuring."""

import re
from dataclasses import dataclass

from orinboard.board import BoardState
from orinboard.files import FileReader, Roots
from orinboard.sensors.gpu import MODULE_TPCS, SMS_PER_TPC, compatible_names
from orinboard.sensors.system import power_mode_names

CONDITIONS = {
    "maxn": "the power mode without limits, with all multiprocessors on",
    "pinned": "GPU and CPU clocks fixed, as jetson_clocks does",
}


@dataclass(frozen=True, slots=True)
class UnmetCondition:
    """A condition that does not hold: what was found, and the command that mends it (or None)."""

    condition: str
    found: str
    command: str | None

    def __str__(self) -> str:
        advice = f"; run: {self.command}" if self.command else ""
        return f"{self.condition}: {self.found}{advice}"


def parse_conditions(spec: str) -> tuple[str, ...]:
    """The conditions in `maxn,pinned`; raises ValueError that says which there are."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in spec.split(",")))
    for name in names:
        if name not in CONDITIONS:
            raise ValueError(f"no condition is called {name!r}: there are {', '.join(CONDITIONS)}")
    return names


def unmet_conditions(
    spec: str, state: BoardState, roots: Roots | None = None
) -> list[UnmetCondition]:
    """The conditions of `spec` that do not hold in `state`; raises ValueError for a bad spec."""
    roots = roots or Roots()
    checks = {"maxn": lambda: maxn_problems(state, roots), "pinned": lambda: pinned_problems(state)}
    return [problem for name in parse_conditions(spec) for problem in checks[name]()]


def maxn_problems(state: BoardState, roots: Roots) -> list[UnmetCondition]:
    """MAXN (MAXN_SUPER where there is one), and the multiprocessors that come with it."""
    files = FileReader(roots)
    # The best mode is called MAXN, and MAXN_SUPER on a board with super mode.
    names = {name: number for number, name in power_mode_names(files).items()}
    best = max((name for name in names if re.match("MAXN", name)), key=len, default="MAXN")
    command = f"sudo nvpmodel -m {names.get(best, 0)}"
    mode = state.power_mode
    if mode is None:
        if state.identity is None:
            return [UnmetCondition("maxn", "this machine has no nvpmodel, so no power mode", None)]
        return [UnmetCondition("maxn", "nvpmodel has never run here", command)]
    name = mode.name or f"mode {mode.id}"
    if mode.name != best and not (mode.name is None and mode.id == 0):
        return [UnmetCondition("maxn", f"the power mode is {name}, not {best}", command)]
    tpcs = {
        tpcs for part in compatible_names(files) for key, tpcs in MODULE_TPCS.items() if key in part
    }
    full = max(tpcs) * SMS_PER_TPC if tpcs else None
    if full is not None and state.sms is not None and state.sms < full:
        # A change of the TPC mask takes effect when the GPU starts anew.
        found = f"the power mode is {name}, but {state.sms} of {full} multiprocessors are on"
        return [UnmetCondition("maxn", found, "sudo reboot")]
    return []


def pinned_problems(state: BoardState) -> list[UnmetCondition]:
    """Both domains fixed, or one that is not there."""
    domains = state.pinned_by_domain
    if not domains:
        return [UnmetCondition("pinned", "this machine shows no clock ranges", None)]
    loose = [domain for domain, fixed in domains.items() if not fixed]
    if not loose:
        return []
    found = f"{' and '.join(loose)} clocks may move"
    return [UnmetCondition("pinned", found, "sudo jetson_clocks")]
