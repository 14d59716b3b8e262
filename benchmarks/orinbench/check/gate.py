"""The correctness gate in front of the timing: whom it checks, and what the record says of it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from orinbench.check import (
    EIGHT_BIT_CACHE,
    EIGHT_BITS_BY_256,
    HALF_WEIGHTS,
    EngineToCheck,
    default_long_prompt_length,
    judge_engine,
    require_passed,
)
from orinbench.check.greedy import tinygrad_decode_function
from orinbench.check.reference import unsupported_feature
from orinbench.errors import BenchError, CheckFailed
from orinbench.measure.backends.backend import Backend, BackendError
from orinbench.measure.backends.llama_server import find_llama_program, llama_cpp_decode_function
from orinbench.measure.backends.tinygrad_backend import DeviceBackend, TinygradBackend
from orinbench.measure.results import LaneResult
from orinbench.model import ModelInfo
from orinbench.progress import Progress
from orinllm.progress import Say

# Weights up to which the float64 reference takes seconds: checked without being asked.
SMALL_MODEL = 300_000_000
# Draws the prompts.
_SEED = 0


class CorrectnessGate:
    """Checks one lane at a time against the float64 reference.

    `asked` is --check or --no-check, None if neither was given. `llama_bench` is the binary whose
    neighbour `llama-server` answers for llama.cpp.
    """

    def __init__(
        self, asked: bool | None, talk: Progress, llama_bench: Path | None, timeout: float
    ) -> None:
        self.asked = asked
        self.talk = talk
        self.llama_bench = llama_bench
        self.timeout = timeout

    def __call__(self, lane: LaneResult, backend: Backend) -> dict[str, Any]:
        """Return what was found, or why nothing was looked for, with a `text` for people.

        Raises CheckFailed for wrong numbers, BenchError for a model that --check cannot check, and
        BackendError for an engine that does not answer.
        """
        assert lane.model is not None, "only lanes with a model have a gate"
        if reason := self._skip_reason(lane.model):
            return {"passed": None, "text": f"numbers not checked: {reason}"}
        name = lane.plan.name
        candidate = self._engine_to_check(name, lane.model, backend)
        if candidate is None:
            return {
                "passed": None,
                "text": f"{name} not checked: no llama-server beside llama-bench",
            }
        self.talk.show_phase(f"{name}: checking tokens and logits against the float64 reference")
        try:
            verdict = judge_engine(
                lane.model, candidate, seed=_SEED, say=self._detail_printer(name)
            )
            require_passed(lane.model, verdict)
        except CheckFailed:
            raise
        except BenchError as error:
            raise BackendError(f"check: {error}") from error
        return {**asdict(verdict), "seed": _SEED, "text": f"passed, {verdict.summary_line()}"}

    def _skip_reason(self, model: ModelInfo) -> str | None:
        if self.asked is False:
            return "--no-check"
        unknown = unsupported_feature(model)
        if unknown and self.asked:
            raise BenchError(f"--check: {model.path}: the float64 reference lacks {unknown}")
        if unknown:
            return f"the float64 reference lacks {unknown}"
        if self.asked is None and model.n_params > SMALL_MODEL:
            return "the model is large; --check does it"
        return None

    def _engine_to_check(
        self, name: str, model: ModelInfo, backend: Backend
    ) -> EngineToCheck | None:
        say = self._detail_printer(name)
        if not isinstance(backend, TinygradBackend):
            return llama_cpp_engine_to_check(model, self.llama_bench, self.timeout, say)
        key_type = backend.plan.key_type
        return tinygrad_engine_to_check(name, model, backend, say, key_type, backend.general)

    def _detail_printer(self, name: str) -> Say:
        return lambda text: self.talk.show_detail(f"{name}: check: {text}")


# By the type of keys and values.
ARITHMETICS = {"f16": HALF_WEIGHTS, "q8_0": EIGHT_BIT_CACHE}


def tinygrad_engine_to_check(
    name: str,
    model: ModelInfo,
    backend: DeviceBackend,
    say: Say,
    key_type: str,
    general: bool = False,
) -> EngineToCheck:
    """Return the engine on a device, or with `general` tinygrad.llm's own network."""
    engine = tinygrad_decode_function(model.path, backend.start_worker, say, general, key_type)
    fused = not general and not name.startswith("tinygrad:CPU")
    return EngineToCheck(
        name, engine, ARITHMETICS[key_type], default_long_prompt_length(model) if fused else 0
    )


def llama_cpp_engine_to_check(
    model: ModelInfo, llama_bench: Path | None, timeout: float, say: Say
) -> EngineToCheck | None:
    """Return llama.cpp as its server answers; None where there is none."""
    if (server := find_llama_program("llama-server", llama_bench)) is None:
        return None
    engine = llama_cpp_decode_function(server, model, timeout, say)
    return EngineToCheck("llama.cpp", engine, EIGHT_BITS_BY_256)
