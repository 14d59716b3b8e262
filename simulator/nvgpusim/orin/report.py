"""Report of a run: the journal that the model writes, its JSON form, and the text for people."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import SimError
from ..locks import GcPausingLock
from ..options import Options
from .gpu_api import NOTIFIER_GAP, ChannelPort, FaultReport
from .rules import RULES, KernelError

if TYPE_CHECKING:
    from .kernel import Kernel

FORMAT = 1
KEPT = 200
"""Refusals, faults and notes kept in full; later ones are only counted."""
SAID = 10
"""Different notes that are printed while the program runs."""


class Journal:
    """Counts and events of one process. Any thread may write."""

    def __init__(self, live: TextIO | None = None) -> None:
        self._lock = GcPausingLock()
        self.live = live
        self.counts: Counter[str] = Counter()
        self.rules: Counter[str] = Counter()
        self.refusals: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.in_use = 0
        self.given_up: dict[tuple[int, int, int], int] = {}
        self.peak = 0
        self.child = False

    def count_rule(self, name: str) -> None:
        """A rule was exercised."""
        self.rules[name] += 1

    def count_call(self, call: str, what: str) -> None:
        """One system call of a kind."""
        self.counts[f"{call} {what}"] += 1

    def count_buffer_bytes(self, delta: int) -> None:
        """Buffers grew or shrank by `delta` bytes."""
        self.in_use += delta
        self.peak = max(self.peak, self.in_use)

    def add_refusal(self, call: str, what: str, error: KernelError, line: str) -> None:
        """A system call failed by a rule."""
        self.counts[f"refused {error.rule}"] += 1
        with self._lock:
            if len(self.refusals) < KEPT:
                self.refusals.append(
                    {
                        "call": call,
                        "what": what,
                        "rule": error.rule,
                        "errno": error.errno,
                        "detail": error.detail or RULES[error.rule].text,
                        "line": line,
                    }
                )

    def add_note(self, text: str) -> None:
        """Something suspicious that no rule forbids."""
        self.counts["notes"] += 1
        with self._lock:
            if len(self.notes) < KEPT and text not in self.notes:
                self.notes.append(text)
                if len(self.notes) <= SAID:
                    more = "; further notes are in the report" if len(self.notes) == SAID else ""
                    self._print_live(f"nvgpusim: note: {text}{more}")

    def add_fault(self, report: FaultReport, port: ChannelPort) -> None:
        """A fatal hardware error."""
        self.counts["faults"] += 1
        entry = {
            "code": report.code,
            "title": report.title,
            "channel": port.id,
            "tsg": port.tsg_id,
            "details": dict(report.details),
            "submitted": port.submit_line or port.line,
        }
        with self._lock:
            if len(self.faults) < KEPT:
                self.faults.append(entry)
                self._print_live("\n".join(fault_lines(entry)))

    def _print_live(self, text: str) -> None:
        if self.live is not None:
            print(text, file=self.live, flush=True)

    def on_fork_child(self) -> None:
        """In a forked child: counts start anew."""
        live = self.live
        self.__init__(live)  # type: ignore[misc]
        self.child = True


def fault_lines(entry: dict[str, Any]) -> list[str]:
    """A fault for people, indented."""
    kind = "no GPU error" if entry["code"] == NOTIFIER_GAP else f"GPU error {entry['code']}"
    head = f"nvgpusim: {kind}: {entry['title']}"
    where = f"  channel {entry['channel']}, TSG {entry['tsg']}: dead"
    return [
        head,
        where,
        *(f"  {k}: {v}" for k, v in entry["details"].items()),
        f"  submitted: {entry['submitted'] or 'unknown'}",
    ]


def collect_report(kernel: Kernel) -> dict[str, Any]:
    """The report of a kernel's life as plain data: call it at exit."""
    with kernel.lock:
        kernel.release_closed_files()
        journal: Journal = kernel.journal
        executor = kernel.executor
        return {
            "nvgpusim-report": FORMAT,
            "options": json.loads(kernel.options.to_json()),
            "argv": sys.argv,
            "child": journal.child,
            "counts": dict(sorted(journal.counts.items())),
            "rules": dict(sorted(journal.rules.items())),
            "refusals": journal.refusals,
            "faults": journal.faults,
            "notes": journal.notes,
            "injected": kernel.injector.log,
            "injections": {i.text: [i.seen, i.fired] for i in kernel.injector.injections},
            "peak_bytes": journal.peak,
            "execution": executor.statistics() if executor is not None else {},
            "leaks": kernel.leak_lines(),
        }


def load_process_reports(path: Path) -> list[dict[str, Any]]:
    """The processes of a report file; raises SimError when it is not one."""
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise SimError(f"{path}: {error.strerror or error}; expected a report file") from error
    except (ValueError, UnicodeDecodeError):
        raise SimError(f"{path}: not a report: expected lines of JSON, from --report") from None
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("nvgpusim-report") != FORMAT:
            raise SimError(f"{path}: not a report of this version (format {FORMAT})")
    if not entries:
        raise SimError(f"{path}: an empty report: no process of the run used the simulator")
    return entries


def _bytes_text(count: int) -> str:
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def repeat_command_text(entry: dict[str, Any]) -> str:
    """The command line that repeats a run: its options, seed included, and its program."""
    words = ["nvgpusim"]
    for name, default in asdict(Options()).items():
        value, flag = entry["options"].get(name, default), "--" + name.replace("_", "-")
        if name in ("record", "report") or value in (default, []):
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
            continue
        if name == "sanitize":
            value = ",".join(value)
        for one in value if isinstance(value, list) else [value]:
            words += [flag, str(one)]
    return shlex.join([*words, "--", *entry["command"]])


def report_text(entry: dict[str, Any], *, full: bool = False) -> str:
    """The report of one process as text.

    `full` tells each GPU error again, which the run has told already, and lists the rules that were
    never exercised.
    """
    lines = [f"== {' '.join(entry['argv']) or 'python'}"]
    counts: dict[str, int] = entry["counts"]
    for call in ("open", "ioctl", "mmap", "close"):
        kinds = {k.partition(" ")[2]: n for k, n in counts.items() if k.startswith(call + " ")}
        if kinds:
            listed = ", ".join(f"{k} {n}" for k, n in sorted(kinds.items(), key=lambda x: -x[1]))
            lines.append(f"{call:>9}  {sum(kinds.values())}: {listed}")
    if entry["execution"]:
        listed = ", ".join(f"{k} {v}" for k, v in entry["execution"].items())
        lines.append(f"execution  {listed}")
    lines.append(f"   memory  peak {_bytes_text(entry['peak_bytes'])}")
    lines.extend(f" injected  {text}" for text in entry["injected"])
    for text in entry["refusals"][: None if full else 10]:
        lines.append(
            f"  refused  {text['what']}: {text['rule']} (errno {text['errno']}): {text['detail']}; "
            f"{text['line']}"
        )
    hidden = sum(n for k, n in counts.items() if k.startswith("refused ")) - (
        len(entry["refusals"]) if full else min(10, len(entry["refusals"]))
    )
    if hidden > 0:
        lines.append(f"  refused  … and {hidden} more")
    lines.extend(f"     note  {text}" for text in entry["notes"])
    for fault in entry["faults"]:
        if full:
            lines.extend(fault_lines(fault))
        else:  # told when it happened
            lines.append(f"    fault  GPU error {fault['code']}: {fault['title']} (above)")
    leaks = entry["leaks"]
    lines.extend(f"     leak  {text}" for text in leaks)
    if not leaks:
        lines.append("    leaks  none")
    if entry.get("command"):
        lines.append(f"    again  {repeat_command_text(entry)}")
    known = [name for name in RULES if name in entry["rules"]]
    lines.append(f"    rules  {len(known)} of {len(RULES)} exercised")
    if full:
        missing = [name for name in RULES if name not in entry["rules"]]
        lines.extend(f"    never  {name}: {RULES[name].text}" for name in missing)
    return "\n".join(lines)
