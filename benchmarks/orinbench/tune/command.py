"""`orinbench tune`: search a model's kernels, carry what was found, use what others found."""

import hashlib
import json
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from orinbench.benchmark.backend import BackendDiedError
from orinbench.benchmark.tinygrad_backend import chosen_device
from orinbench.board.environment import package_version
from orinbench.errors import EXIT_INTERRUPTED, BenchError
from orinbench.talk import duration, make_talk
from orinbench.tune import tuning
from orinbench.tune.events import events
from orinbench.tune.tuning import Entry, Target, Timing
from orinbench.tune.workload import Workload, model_options, seconds_of, workload

EXIT_SOME_FAILED = 1
# Time limit of one kernel's check, the model's load and compilation included for the first.
_CHECK_SECONDS, _LOAD_SECONDS = 120.0, 1800.0


@click.group("tune", context_settings={"max_content_width": 100})
def tune_command() -> None:
    """Search for faster kernels, and keep them as a file."""


@tune_command.command("search")
@click.argument("model", required=False, metavar="[MODEL]")
@model_options
@click.option("--level", default=2, type=click.IntRange(1, 64), help="BEAM [2]")
@click.option("--budget", metavar="TIME", help="stop after 90s, 30m, 1h [when done]")
@click.option("--again", is_flag=True, help="search kernels that have been searched too")
def search_command(model: str | None, **options: Any) -> int:
    """Search MODEL's kernels, the most expensive first.

    Each result is kept at once, in tinygrad's cache and for `tune export`: an interrupted search
    goes on where it stopped when it is started again.
    """
    budget = None if options["budget"] is None else seconds_of(options["budget"], "--budget")
    run = Search(workload(model, options), chosen_device(options["device"]), budget, options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run.run()
    click.echo(run.summary())
    return code


class Search:
    """One run of `tune search MODEL`."""

    def __init__(
        self, work: Workload, device: str, budget: float | None, options: dict[str, Any]
    ) -> None:
        self.work, self.device, self.budget = work, device, budget
        self.level, self.again = options["level"], options["again"]
        self.talk = make_talk(False)
        self.started = time.monotonic()
        self.target: Target | None = None
        self.measured_on = ""
        self.by_hand = 0
        self.kernels: dict[str, dict[str, Any]] = {}  # what the worker told of each
        self.failed: dict[str, str] = {}
        self.done: dict[str, Entry] = {}
        self.searched = 0
        self.now: str | None = None  # the kernel that is being searched

    def patience(self) -> float:
        """Return the seconds until the budget is spent."""
        left = float("inf") if self.budget is None else self.budget
        return max(0.001, min(left - (time.monotonic() - self.started), 24 * 3600.0))

    def run(self) -> int:
        """Search until done, interrupted or out of time; returns the exit code.

        A kernel that takes the worker with it counts as failed; a new worker takes the others.
        """
        try:
            while not self._search():
                pass
        except KeyboardInterrupt:
            self._say_left("interrupted")
            return EXIT_INTERRUPTED
        except BackendDiedError as error:
            if self.budget is None or time.monotonic() - self.started < self.budget:
                raise BenchError(f"tune: {self.device}: {error}") from error
            self._say_left("the budget is spent")
            return 0
        finally:
            self.talk.close()
        return EXIT_SOME_FAILED if self.failed else 0

    def _search(self) -> bool:
        """Search what is left in one worker; returns whether it came to the end."""
        kept = [] if self.again else tuning.load_store()
        known = {
            (entry.kernel, entry.target): entry
            for entry in [*kept, *self.done.values()]
            if entry.level == self.level
        }
        request = self.work.request(
            "search",
            level=self.level,
            known=[asdict(entry) for entry in known.values()],
            skip=list(self.failed),
        )
        self.now = None
        self.talk.phase(f"meeting the kernels of {self.work.label} on {self.device}")
        try:
            with events(self.device, request, self.patience) as stream:
                for event in stream:
                    self._take(event, known)
        except BackendDiedError as error:
            if self.now is None or self.patience() < 1:
                raise
            self._take({"event": "failed", "kernel": self.now, "error": str(error)}, known)
            return False
        return True

    def _say_left(self, why: str) -> None:
        left = len(self.kernels) - len(self.done) - len(self.failed)
        again = "" if not left and self.kernels else ": the same command goes on from here"
        self.talk.line(f"{why}; {len(self.done)} of {len(self.kernels)} kernels kept{again}")

    def _take(self, event: dict[str, Any], known: dict[tuple[str, Target], Entry]) -> None:
        match event["event"]:
            case "opened":
                self.target = Target(**event["target"])
                self.measured_on = event["measured_on"]
            case "model":
                self.by_hand = event["by_hand"]
                self.talk.phase(f"timing {event['kernels']} kernels with default optimizations")
            case "kernel":
                self.kernels[event["kernel"]] = event
                assert self.target is not None
                if (entry := known.get((event["kernel"], self.target))) is not None:
                    self.done[entry.kernel] = entry
            case "met":
                left = len(self.kernels) - len(self.done)
                said = f"; {len(self.done)} were searched before" if self.done else ""
                self.talk.line(f"{left} kernels to search with BEAM={self.level}{said}")
            case "begin":
                self.now = event["kernel"]
                number = len(self.done) + len(self.failed) + 1
                told = self.kernels[event["kernel"]]
                time_left = f", {duration(self.patience())} left" if self.budget else ""
                self.talk.phase(
                    f"[{number}/{len(self.kernels)}] {told['name']}: searching{time_left}"
                )
            case "found":
                self._found(event)
            case "failed":
                self.failed[event["kernel"]] = event["error"]
                told = self.kernels.get(event["kernel"], {"name": event["kernel"][:12]})
                self.talk.line(f"{told['name']}: {event['error']}")

    def _found(self, event: dict[str, Any]) -> None:
        assert self.target is not None
        told = self.kernels[event["kernel"]]
        entry = Entry(
            event["kernel"],
            self.target,
            self.level,
            name=told["name"],
            opts=event["opts"],
            default_opts=event["default_opts"],
            before=Timing(**event["before"]),
            after=Timing(**event["after"]),
            search_s=event["search_s"],
            model=self.work.label,
            launches=dict(sorted(told["launches"].items())),
            measured_on=self.measured_on,
            measured=datetime.now(UTC).date().isoformat(),
        )
        self.done[entry.kernel] = entry
        self.searched += not event["from_cache"]
        tuning.keep([entry])
        how = (
            "from tinygrad's cache"
            if event["from_cache"]
            else f"{event['candidates']} candidates, {event['search_s']:.1f} s"
        )
        kept = "; the search's choice was slower, the default stays" * event["default_kept"]
        number = len(self.done) + len(self.failed)
        self.talk.line(f"[{number}/{len(self.kernels)}] {entry.line} ({how}{kept})")

    def summary(self) -> str:
        """Return the result for people: the ten largest gains, and sums by token and prompt."""
        lines = []
        gains = sorted(self.done.values(), key=lambda entry: -entry.gain)
        if gains:
            lines += ["| kernel | launches token, prompt | us before | us after | speedup | opts |"]
            lines += ["| --- | ---: | ---: | ---: | ---: | --- |"]
        for entry in gains[:10]:
            uses = ", ".join(str(entry.launches.get(use, 0)) for use in ("token", "prompt"))
            lines.append(
                f"| {entry.name} | {uses} | {entry.before.median:.1f} | {entry.after.median:.1f} |"
                f" {entry.speedup:.2f}x | {entry.opts or 'none'} |"
            )
        if len(gains) > 10:
            lines.append(f"and {len(gains) - 10} more: `orinbench tune export FILE` has them all")
        for use in ("token", "prompt"):
            before, after, of = self._sums(use)
            if of:
                lines.append(f"{of} kernels of a {use}: {before:.1f} -> {after:.1f} us in all")
        if self.by_hand:
            lines.append(
                f"A token is {self.by_hand} hand-written kernels, which no search changes; "
                "--general searches tinygrad's own kernels instead."
            )
        lines.append(
            f"{len(self.done)} of {len(self.kernels)} kernels have results, "
            f"{self.searched} searched now; kept in {tuning.store_path()}"
        )
        if self.done:
            lines.append(f"BEAM={self.level} or JITBEAM={self.level} uses them without a search.")
        return "\n".join(lines)

    def _sums(self, use: str) -> tuple[float, float, int]:
        """Return microseconds before and after, and launches; unsearched ones stay as they are."""
        before = after = 0.0
        of = 0
        for digest, told in self.kernels.items():
            count = told["launches"].get(use, 0)
            entry = self.done.get(digest)
            before += count * (entry.before.median if entry else told["default_us"])
            after += count * (entry.after.median if entry else told["default_us"])
            of += count
        return before, after, of


def _device_name(device: str) -> str:
    """Return the device of a DEV: "MOCK+NV:PTX:sm_87" is NV."""
    return device.rpartition("+")[2].partition(":")[0].upper()


@tune_command.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--device", metavar="DEV", help="only results of this tinygrad device")
@click.option("--level", type=int, help="only results of this BEAM level")
def export_command(file: Path, device: str | None, level: int | None) -> None:
    """Write what `tune` has found on this machine to FILE."""
    entries = [
        entry
        for entry in tuning.load_store()
        if (device is None or entry.target.device == _device_name(device))
        and (level is None or entry.level == level)
    ]
    if not entries:
        raise BenchError(f"tune export: nothing to write from {tuning.store_path()}; tune first")
    tuning.write(entries, file)
    click.echo(f"{file}: {len(entries)} kernels", err=True)


@tune_command.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("model", required=False, metavar="[MODEL]")
@model_options
@click.option("--once", is_flag=True, help="do nothing where the same import has been done")
def import_command(file: Path, model: str | None, **options: Any) -> int:
    """Check the entries of FILE on MODEL, and use those that hold.

    An entry has to compile and to be no slower than the default, launches of both taken in turn.
    What does not hold is named in a line and stays out.
    """
    entries = tuning.load(file)
    work, device = workload(model, options), chosen_device(options["device"])
    stamp = _stamp(file, work, device)
    if options["once"] and stamp.exists():
        return 0
    run = Import(entries, work, device)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run.run()
    if code != EXIT_INTERRUPTED:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    return code


def _stamp(file: Path, work: Workload, device: str) -> Path:
    """Return the file whose existence says that this import has been done."""
    model = work.path.stat()
    about = (file.read_text(), work.label, model.st_size, model.st_mtime_ns, device)
    digest = hashlib.sha256(json.dumps((about, package_version("tinygrad"))).encode()).hexdigest()
    return tuning.store_path().parent / "imported" / digest[:32]


class Import:
    """One run of `tune import`."""

    def __init__(self, entries: Sequence[Entry], work: Workload, device: str) -> None:
        self.work, self.device = work, device
        self.talk = make_talk(False)
        self.target: Target | None = None
        self.wanted = dict(enumerate(entries))
        self.accepted: list[Entry] = []
        self.foreign: Counter[Target] = Counter()
        self.rejected = self.absent = 0

    def run(self) -> int:
        """Check until done; returns the exit code."""
        try:
            self.talk.phase(f"meeting the kernels of {self.work.label} on {self.device}")
            while self.wanted:
                self._check()
        except KeyboardInterrupt:
            self.talk.line(f"interrupted; {len(self.accepted)} entries are in use")
            return EXIT_INTERRUPTED
        finally:
            self.talk.close()
            if self.accepted:
                tuning.keep(self.accepted)
        for made, count in self.foreign.items():
            self.talk.line(f"{count} entries are for {made}; here is {self.target}")
        absent = f", {self.absent} for kernels that this model does not have" * bool(self.absent)
        self.talk.line(f"{len(self.accepted)} in use, {self.rejected} rejected{absent}")
        return EXIT_SOME_FAILED if self.rejected else 0

    def _check(self) -> None:
        """Check entries in one worker; one that the worker does not survive is rejected."""
        asked = [
            {"entry": i, **{k: asdict(e)[k] for k in ("kernel", "level", "opts", "target")}}
            for i, e in self.wanted.items()
        ]
        request = self.work.request("check", entries=asked)
        now: int | None = None

        def patience() -> float:
            return _LOAD_SECONDS if now is None else _CHECK_SECONDS

        try:
            with events(self.device, request, patience) as stream:
                for event in stream:
                    if event["event"] == "opened":
                        self.target = Target(**event["target"])
                    elif event["event"] == "begin":
                        now = event["entry"]
                    elif "entry" in event:
                        self._take(event, self.wanted.pop(event["entry"]))
        except BackendDiedError as error:
            if now is None or now not in self.wanted:
                raise BenchError(f"tune: {self.device}: {error}") from error
            self._reject(self.wanted.pop(now), str(error))

    def _take(self, event: dict[str, Any], entry: Entry) -> None:
        if event["event"] == "foreign":
            self.foreign[entry.target] += 1
        elif event["event"] == "absent":
            self.absent += 1
        elif event["event"] == "rejected":
            self._reject(entry, event["reason"])
        else:
            assert self.target is not None
            here = replace(
                entry,
                target=self.target,
                before=Timing(**event["before"]),
                after=Timing(**event["after"]),
            )
            self.accepted.append(here)
            self.talk.line(f"in use: {here.line}")

    def _reject(self, entry: Entry, reason: str) -> None:
        self.rejected += 1
        self.talk.line(f"rejected: {entry.name} ({entry.kernel[:12]}): {reason}")
