"""llama.cpp's own `llama-bench` as a backend: one call of the binary per repetition.

Several sequences at once are a call of `llama-batched-bench`, which is beside it.
A case with a text is one start of `llama-server`.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orinbench.child import PIPE, ChildProcess
from orinbench.errors import BenchError
from orinbench.judge.load_results import ran_on_cpu
from orinbench.measure.backends.backend import (
    Backend,
    BackendError,
    BackendIdentity,
    CaseLeftOutError,
    FirstTokenTime,
    Sample,
    WarmUpCost,
)
from orinbench.measure.backends.llama_server import (
    find_llama_program,
    llama_server_arguments,
    one_token_request,
    time_first_text,
)
from orinbench.measure.backends.sm_limit import GreenContextPreload
from orinbench.measure.backends.tinygrad_backend import FIRST_TOKEN_PROMPT
from orinbench.measure.backends.worker_process import exit_text
from orinbench.measure.plan import KNOB_BY_FIELD, Case, Lane
from orinbench.measure.prompt_text import random_prompt_text
from orinbench.pictures import QUESTION, RandomPictures

# The first repetition inside a llama-bench call is slower than the next ones even after its own
# warm-up (on CUDA by up to a quarter, for prompts), so each call runs two and the first is put
# aside: it stays in the record as `discarded_ns`. So it is done with llama-batched-bench.
REPETITIONS_PER_CALL = 2
# llama.cpp gives each sequence a multiple of so many tokens (llama-context.cpp).
CONTEXT_OF_SEQUENCE = 256
# What llama-mtmd-cli says of its encoder, before and from the versions on that have batches.
_ENCODED = re.compile(r"(?:slice encoded|batch encoding done) in (\d+) ms")
# Markers of a repetition's end: llama-bench's record of all, llama-batched-bench's of each.
_SAMPLES, _BATCHED = (b'"samples_ns"', 1), (b'"t_tg"', REPETITIONS_PER_CALL)
# Added to a seed: a text that no round has.
_OTHER_TEXT = 1 << 32


def find_llama_bench(given: str | None) -> Path | None:
    """Return the binary that `--llama-bench` names or PATH has; raises BenchError if unusable."""
    if given is None:
        found = shutil.which("llama-bench")
        return Path(found) if found else None
    path = Path(given)
    if not path.is_file():
        raise BenchError(f"--llama-bench {given}: no such file; name llama.cpp's llama-bench")
    if not os.access(path, os.X_OK):
        raise BenchError(f"--llama-bench {given}: not executable; try chmod +x {given}")
    return path.absolute()


@dataclass(frozen=True)
class BinaryResult:
    """Result of one run of the binary."""

    record: dict[str, Any]
    wall_s: float
    ended_s: float | None  # when the record came: llama-bench prints it right behind its timing
    peak_rss_bytes: int


class LlamaCppBackend(Backend):
    """llama.cpp with one model.

    Nothing of it stays loaded between repetitions: each call of the binary loads the model, warms
    up as llama-bench does (the whole prompt, one token), and times inside, so that process start,
    load and warm-up are in no sample.
    """

    def __init__(
        self,
        binary: Path,
        plan: Lane,
        timeout: float,
        extra: Sequence[str] = (),
        verbose: bool = False,
        preload: GreenContextPreload | None = None,
    ) -> None:
        self.plan = plan
        self._preload = preload
        self._binary, self._extra = binary, tuple(extra)
        self._batched = find_llama_program("llama-batched-bench", binary)
        if plan.most_sequences > 1 and self._batched is None:
            beside = binary.with_name("llama-batched-bench")
            raise BenchError(
                f"-npl: there is no {beside}, which llama.cpp needs for it; build it there"
            )
        self._timeout = timeout
        self._verbose = verbose
        self._first: BinaryResult | None = None
        self._sms: int | None = None

    def open_and_identify(self) -> BackendIdentity:
        """Run one chunk of prompt and one token: the model loads and the binary says what it is."""
        first = self.plan.cases[0]
        case = Case(FIRST_TOKEN_PROMPT, 1, 0, first.settings)
        self._first = self._run_llama_bench(case, repetitions=1, extra=("--no-warmup",))
        record = self._first.record
        number = record.get("build_number")
        return BackendIdentity(
            software=f"llama.cpp {record.get('build_commit', 'unknown')}",
            build_commit=str(record.get("build_commit", "unknown")),
            build_number=number if isinstance(number, int) else None,
            device="CPU" if ran_on_cpu(record) else str(record.get("backends", "unknown")),
            device_name=str(record.get("gpu_info") or "") or None,
            n_threads=record.get("n_threads"),
            sms=self._sms,
        )

    def time_first_token(self) -> FirstTokenTime:
        """Return the wall time of the first call: process start to first token, and its exit."""
        assert self._first is not None, "open_and_identify() comes first"
        return FirstTokenTime(FIRST_TOKEN_PROMPT, self._first.wall_s)

    def warm_up(self, case: Case) -> WarmUpCost | None:
        """Do nothing: every call of a binary warms up by itself. Raises CaseLeftOutError."""
        if case.text:
            self._server_command(case)
        elif case.picture:
            self._require_mtmd_cli()
        return None

    def time_repetition(self, case: Case, seed: int) -> Sample:
        """Call the binary and keep the last of its repetitions; it draws its own token ids."""
        if case.text:
            return self._time_first_text(case, seed)
        if case.picture:
            return self._time_encoder(case, seed)
        if case.n_parallel > 1:
            call = self._run_batched_bench(case)
        else:
            call = self._run_llama_bench(case, REPETITIONS_PER_CALL)
        samples = call.record.get("samples_ns")
        if not isinstance(samples, list) or len(samples) != REPETITIONS_PER_CALL:
            raise BackendError(f"llama.cpp gave no {REPETITIONS_PER_CALL} samples_ns")
        return Sample(
            ns=int(samples[-1]),
            ended_s=call.ended_s,
            peak_rss_bytes=call.peak_rss_bytes,
            discarded_ns=[int(ns) for ns in samples[:-1]],
            engine_record=call.record,
        )

    def _server_command(self, case: Case) -> tuple[Path, list[str]]:
        binary = find_llama_program("llama-server", self._binary)
        if binary is None:
            raise CaseLeftOutError("no llama-server beside llama-bench or on PATH")
        # It refuses a prompt that leaves no room for an answer.
        tokens = max(self.plan.max_context, case.context_length + CONTEXT_OF_SEQUENCE)
        context = ["-c", str(tokens), "-np", "1"]
        settings = llama_server_arguments(case.settings)
        sees = ["--mmproj", str(self.plan.mmproj)] * bool(case.picture)
        return binary, ["-m", str(self.plan.model), *sees, *context, *self._extra, *settings]

    @staticmethod
    def _warm_and_timed_requests(
        case: Case, model: Path, seed: int
    ) -> list[tuple[str, dict[str, Any]]]:
        if case.picture:
            pictures = RandomPictures.parse(case.picture, seed)
            return [one_token_request(QUESTION, pictures.data_uri(number)) for number in (1, 0)]
        drawn = (seed + _OTHER_TEXT, seed)
        return [one_token_request(random_prompt_text(model, case.n_prompt, each)) for each in drawn]

    def _require_mtmd_cli(self) -> Path:
        binary = find_llama_program("llama-mtmd-cli", self._binary)
        if binary is None:
            raise CaseLeftOutError("no llama-mtmd-cli beside llama-bench or on PATH")
        return binary

    def _time_encoder(self, case: Case, seed: int) -> Sample:
        """Call llama-mtmd-cli, which warms its encoder up; it has whole milliseconds."""
        binary, arguments = self._require_mtmd_cli(), llama_server_arguments(case.settings)
        with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
            file.write(RandomPictures.parse(case.picture, seed).jpeg(0))
            file.flush()
            asked = ["--image", file.name, "-p", "What?", "-n", "1", "--temp", "0"]
            asked += ["--mmproj", str(self.plan.mmproj), "-c", str(self.plan.max_context)]
            talk = self._run_binary(
                binary, [*asked, *self._extra, *arguments], None, _parse_encoder_ms
            )
        if not (ms := sum(talk.record["ms"])):
            raise BackendError(f"llama-mtmd-cli says no time of its encoder: {talk.record}")
        return Sample(
            ns=1_000_000 * ms,
            ended_s=talk.ended_s,
            peak_rss_bytes=talk.peak_rss_bytes,
            engine_record=self._engine_record(case),
        )

    def _time_first_text(self, case: Case, seed: int) -> Sample:
        """Start llama-server, warm it up with one text, and time another."""
        binary, arguments = self._server_command(case)
        model = self.plan.model
        assert model is not None
        requests = self._warm_and_timed_requests(case, model, seed)
        try:
            found = time_first_text(binary, arguments, requests, self._timeout, **self._environment)
            self._store_sm_count()
        except BenchError as error:
            raise BackendError(str(error)) from error
        if found.n_tokens != case.n_prompt and not case.picture:
            raise BackendError(
                f"llama-server made {found.n_tokens} tokens of a text of {case.n_prompt}"
            )
        return Sample(
            ns=found.ns,
            ended_s=found.ended_s,
            engine_record=self._engine_record(case),
            extra={"http_ms": found.http_ns / 1e6}
            | ({"prompt_tokens": found.n_tokens} if case.picture else {}),
        )

    @property
    def _environment(self) -> dict[str, str]:
        return self._preload.environment if self._preload else {}

    def _store_sm_count(self) -> None:
        if self._preload is not None:
            self._sms = self._preload.pop_reported_sm_count()

    def _engine_record(self, case: Case) -> dict[str, Any]:
        """Return what llama-bench's record of a case says of build, machine and settings."""
        record = self._first.record if self._first else {}
        settings = dict(case.settings)
        if "flash_attn" in settings:
            asked = str(settings["flash_attn"])
            settings["flash_attn"] = {"off": 0, "on": 1, "auto": -1}.get(asked, asked)
        return record | settings

    def _run_llama_bench(
        self, case: Case, repetitions: int, extra: Sequence[str] = ()
    ) -> BinaryResult:
        often = ["-o", "json", *self._extra, *extra, "-r", str(repetitions)]
        return self._run_binary(
            self._binary, [*often, *llama_bench_arguments(case)], _SAMPLES, _parse_llama_bench
        )

    def _run_batched_bench(self, case: Case) -> BinaryResult:
        assert self._batched is not None, "the plan has several sequences"
        extra = [word for word in self._extra if word != "--no-warmup"]  # which it does not have
        arguments = [*extra, *batched_bench_arguments(case)]
        return self._run_binary(self._batched, arguments, _BATCHED, _parse_batched_bench)

    def _run_binary(
        self,
        binary: Path,
        arguments: Sequence[str],
        end: tuple[bytes, int] | None,
        read: Callable[[str], dict[str, Any]],
    ) -> BinaryResult:
        """Run a binary on the model; the record, which `read` reads, has come with its `end`.

        That is so many of a marker; None: there is none, and it talks on standard error.
        """
        output, ended_s = b"", None
        command = [binary, "-m", self.plan.model, *arguments]
        try:
            child = ChildProcess(
                command, self._environment, self._verbose and end is not None, out=PIPE
            )
        except OSError as error:
            raise BackendError(f"{binary.name} does not start: {error}") from error
        with child:
            try:
                while data := child.read_output(child.started + self._timeout):
                    output += data
                    if end and ended_s is None and output.count(end[0]) >= end[1]:
                        ended_s = time.monotonic()
            except TimeoutError:
                child.terminate(grace=0)
                raise BackendError(
                    f"{binary.name} did not end in {self._timeout:g} s (--timeout)"
                ) from None
            status = child.wait()
            wall_s = time.monotonic() - child.started
            said = child.error_output() if end is None else ""
            if status != 0:
                why = _failure_reason(child.error_output())
                raise BackendError(f"{binary.name} {exit_text(status or 0)}: {why}")
        try:
            self._store_sm_count()
        except BenchError as error:
            raise BackendError(str(error)) from error
        record = read(output.decode(errors="replace") + said)
        return BinaryResult(record, wall_s, ended_s, child.peak_bytes)


def _parse_llama_bench(output: str) -> dict[str, Any]:
    try:
        (record,) = json.loads(output)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise BackendError(f"llama-bench printed no JSON array of one object: {output[:200]!r}")
    return record


def _parse_encoder_ms(output: str) -> dict[str, Any]:
    return {"ms": [int(ms) for ms in _ENCODED.findall(output)]}


def _parse_batched_bench(output: str) -> dict[str, Any]:
    """Return what llama-batched-bench says, by llama-bench's names.

    Without a depth it divides by no time at all: a speed may be nan, which is no JSON.
    """
    fields = re.findall(r'"(n_batch|n_ubatch|n_threads|n_gpu_layers)": *(-?[0-9]+)', output)
    samples = [float(s) * 1e9 for s in re.findall(r'"t_tg": *([0-9.]+)', output)]
    return {name: int(value) for name, value in fields} | {"samples_ns": samples}


def _failure_reason(errors: str) -> str:
    """Return the line of llama-bench's talk that says why, else the last one."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "invalid" in line.lower()]
    return (telling or lines or ["it gave no reason"])[-1]


def llama_bench_arguments(case: Case) -> list[str]:
    """Return llama-bench's arguments for one case."""
    if case.n_prompt and case.n_gen:
        arguments = ["-p", "0", "-n", "0", "-pg", f"{case.n_prompt},{case.n_gen}"]
    else:
        arguments = ["-p", str(case.n_prompt), "-n", str(case.n_gen)]
    arguments += ["-d", str(case.n_depth)] if case.n_depth else []
    return arguments + _setting_flags(case)


def batched_bench_arguments(case: Case) -> list[str]:
    """Return llama-batched-bench's arguments for one case, as often as a call repeats it."""
    context = -(-case.context_length // CONTEXT_OF_SEQUENCE) * CONTEXT_OF_SEQUENCE
    sequences = ",".join([str(case.n_parallel)] * REPETITIONS_PER_CALL)
    arguments = ["-c", str(case.n_parallel * context), "-npp", str(case.n_depth)]
    arguments += ["-ntg", str(case.n_gen), "-npl", sequences, "--output-format", "jsonl"]
    return arguments + _setting_flags(case)


def _setting_flags(case: Case) -> list[str]:
    pairs = ((KNOB_BY_FIELD[field].flags[0], str(value)) for field, value in case.settings)
    return [word for pair in pairs for word in pair]
