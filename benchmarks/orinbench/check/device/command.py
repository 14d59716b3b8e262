"""`orinbench device-check`: takes the steps on a board, and judges a report against the claims."""

import json
import os
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from orinbench.check.device.claims import (
    FORMAT,
    ClaimOutcome,
    DriverChoiceAnswer,
    judge_claim,
    load_claims,
    load_report,
    values_at_path,
)
from orinbench.check.device.privacy import Scrubber, machine_secrets
from orinbench.check.device.steps import (
    CTRL,
    STEPS,
    DeviceCheck,
    Step,
    StepNotPossible,
    StepOutOfTime,
)
from orinbench.errors import EXIT_INTERRUPTED, BenchError
from orinbench.files_and_json import parse_dataclass, write_atomically
from orinbench.measure.environment import package_version
from orinbench.model import open_model
from orinbench.options import ANY_PATH, FILE, option
from orinbench.progress import Progress, duration_text
from orinbench.show.markdown import counted_noun

REPORT = "report.json"
_BOARD = ("steps", "identity", "result", "environment", "board")
EXIT_STEP_FAILED = 1
EXIT_REFUTED = 1
# Set in every process that nvgpusim simulates a board for.
_SIMULATED = "NVGPUSIM_OPTIONS"
_NAMES = tuple(step.name for step in STEPS)
FOLDER = click.Path(path_type=Path, file_okay=False)
_FOLDER = "Folder for report.json and trace.jsonl."
_MODEL = "Model that llama-bench measures. [default: synthetic 1B]"


@click.group(
    "device-check",
    invoke_without_command=True,
    context_settings={"max_content_width": 100},
    epilog="Steps: " + "; ".join(f"{step.name}: {step.about}" for step in STEPS),
)
@option("folder --output", _FOLDER, default="device-check", type=FOLDER, metavar="DIR")
@option("--only", "Take only these steps.", metavar="LIST")
@option("--fresh", "Take all steps again, also those that the report has.", is_flag=True)
@option("--model", _MODEL, type=ANY_PATH, metavar="FILE")
@click.pass_context
def device_check_command(
    context: click.Context, folder: Path, only: str | None, fresh: bool, model: Path | None
) -> int:
    """Collect what only a real Orin can show.

    The result is one report and one trace, within an hour.

    Runs unattended. Each step is recorded when it is done: the same command goes on after an
    interruption. Nothing in the report says whose board it is.
    """
    if context.invoked_subcommand is not None:
        return 0
    names = {name for name in (only or ",".join(_NAMES)).split(",") if name}
    if unknown := sorted(names - set(_NAMES)):
        raise BenchError(f"--only {only}: no step {unknown[0]}; there are {', '.join(_NAMES)}")
    if not os.path.exists(CTRL):
        raise BenchError(
            f"device-check: no Orin's GPU here: {CTRL} does not exist; run it on the board"
        )
    if model:
        open_model(model)
    check = DeviceCheck(
        folder=folder.absolute(),
        simulated=_SIMULATED in os.environ,
        begun_us=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000,
        model=model,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = resumed_or_new_report(check, fresh)
    return run_missing_steps(
        check, report, [step for step in STEPS if step.name in names], Progress()
    )


def software_versions() -> dict[str, str | None]:
    """Return what the figures are of."""
    return {
        "orinbench": package_version("tinygrad-orin"),
        "tinygrad": package_version("tinygrad"),
        "flake": os.environ.get("TINYGRAD_ORIN_REVISION"),
    }


def resumed_or_new_report(check: DeviceCheck, fresh: bool) -> dict[str, Any]:
    """Return the report to go on with, or a new one; raises BenchError for another check's."""
    path = check.folder / REPORT
    new = {
        "format": FORMAT,
        "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "simulated": check.simulated,
        "versions": software_versions(),
        "steps": {},
    }
    if fresh or not path.exists():
        return new
    old = load_report(path)
    for key in ("simulated", "versions"):
        if old[key] != new[key]:
            raise BenchError(
                f"{path}: its {key} are {old[key]}, here {new[key]}; "
                "use --fresh or another --output"
            )
    return old


def run_missing_steps(
    check: DeviceCheck, report: dict[str, Any], steps: Sequence[Step], talk: Progress
) -> int:
    """Take the steps that the report lacks, record each; returns the exit code."""
    path = check.folder / REPORT
    scrub = Scrubber(machine_secrets() | {str(check.folder)})
    left = [s for s in steps if report["steps"].get(s.name, {}).get("status") != "done"]
    if len(left) < len(steps):
        talk.print_line(
            f"done already: {counted_noun(len(steps) - len(left), 'step')}; to take: {len(left)}"
        )
    if check.simulated:
        talk.print_line("a simulated GPU and the least work; no figure says anything of a board")
    _write_report(report, path)
    try:
        for number, step in enumerate(left, 1):
            talk.show_phase(
                f"[{number}/{len(left)}] {step.name}: {step.about}, "
                f"at most {duration_text(step.seconds)}"
            )
            entry = scrub(run_step(check, step))
            report["steps"][step.name] = entry
            _write_report(report, path)
            reason = f": {entry['reason']}" if entry["reason"] else ""
            talk.print_line(f"{step.name}: {entry['status']} in {entry['seconds']:.0f} s{reason}")
    except KeyboardInterrupt:
        talk.print_line(f"interrupted; {path} has what was done, the same command goes on")
        return EXIT_INTERRUPTED
    finally:
        talk.close()
    talk.print_line(f"{path}; judge it with `orinbench device-check verify {path}`")
    failed = [name for name, entry in report["steps"].items() if entry["status"] == "failed"]
    return EXIT_STEP_FAILED if failed else 0


def _write_report(report: dict[str, Any], path: Path) -> None:
    write_atomically(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def run_step(check: DeviceCheck, step: Step) -> dict[str, Any]:
    """Take a step; return its entry in the report, whatever happens."""
    begun = time.monotonic()
    status, reason, result = "done", None, None
    try:
        result = step.take(check, step.seconds)
    except StepNotPossible as error:
        status, reason = "not run", str(error)
    except StepOutOfTime as error:
        status, reason, result = "out of time", str(error), error.result
    except Exception as error:  # a step that fails costs the others nothing
        status, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    seconds = round(time.monotonic() - begun, 2)
    return {"status": status, "seconds": seconds, "reason": reason, "result": result}


@device_check_command.command("verify")
@click.argument("file", type=FILE)
def verify_command(file: Path) -> int:
    """Judge a report against the claims of the pages.

    It judges every claim that a board can confirm. Exit code 1 says that one is refuted.
    """
    report = load_report(file)
    judged = [(claim, *judge_claim(claim, report)) for claim in load_claims()]
    (board,) = values_at_path(report, _BOARD) or ["a board without a name"]
    simulated = " (simulated: nothing about a board)" if report["simulated"] else ""
    where = "the simulator: nothing here is confirmed for hardware" if simulated else board
    click.echo(
        f"Report of {report['started']}, tinygrad {report['versions'].get('tinygrad')}, {where}"
    )
    for outcome in ClaimOutcome:
        if of := [(claim, because) for claim, found, because in judged if found is outcome]:
            click.echo(f"\n{outcome.value} ({len(of)}):")
        for claim, because in of:
            click.echo(f"  {claim.id}: {claim.text} ({claim.doc})")
            if because:
                click.echo(f"    {because}")
    (answers,) = values_at_path(report, ("steps", "performance", "result")) or [None]
    lines = [_driver_choice_line(name, entry) for name, entry in (answers or {}).items()]
    path = ("steps", "llama-bench", "result", "records", "*", "comparisons", "*", "text")
    lines += [f"llama-bench: {text}" for text in values_at_path(report, path)]
    if lines:
        click.echo(f"\nperformance{simulated}:")
    for line in lines:
        click.echo(f"  {line}")
    return EXIT_REFUTED if any(found is ClaimOutcome.REFUTED for _, found, _ in judged) else 0


def _driver_choice_line(name: str, entry: Any) -> str:
    answer = parse_dataclass(DriverChoiceAnswer, entry, f"performance: {name}")
    figure = f"; {answer.figure} {answer.ratio:.3f} of the other's" if answer.ratio else ""
    return f"{name}: {answer.own} or {answer.other}: {answer.verdict}{figure}"
