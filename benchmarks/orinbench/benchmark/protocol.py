"""The protocol of the bench and its worker processes: one JSON object a line over pipes.

One dataclass per message; `encode` and `decode` are the whole wire format. Times are seconds or
nanoseconds as the field says, sizes are bytes.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from orinbench.benchmark.plan import Case, SuiteCase


@dataclass(frozen=True)
class Open:
    """Open the device that the environment variable DEV names and run one kernel on it."""


@dataclass(frozen=True)
class Identity:
    """A backend's description of itself when its device is open and computes."""

    software: str  # e.g. "tinygrad 0.13.0+orin.0123456789ab"
    build_commit: str
    build_number: int | None
    device: str  # tinygrad's device, or llama.cpp's backends field
    device_name: str | None  # as the vendor calls it, where that can be read
    driver: str | None = None
    arch: str | None = None
    n_threads: int | None = None  # threads that kernels may use, on the CPU device
    renderer: str | None = None
    sms: int | None = None  # multiprocessors, where not all of the device are used


@dataclass(frozen=True)
class MeasureBandwidth:
    """Copy a buffer on the device, several times."""

    n_bytes: int
    repetitions: int


@dataclass(frozen=True)
class Bandwidth:
    """Bytes read plus bytes written per second, for each repetition."""

    n_bytes: int
    samples_gb_s: list[float]


@dataclass(frozen=True)
class Load:
    """Load a GGUF for contexts of up to `max_context` tokens, and take the first token.

    That is of a prompt of `n_prompt` random tokens. `general`: into tinygrad.llm's own network.
    """

    model: str
    max_context: int
    sequences: int = 1  # so many contexts fit
    key_type: str = "f16"  # of keys and values, in llama.cpp's words
    n_prompt: int = 1
    general: bool = False


@dataclass(frozen=True)
class Loaded:
    """The model is loaded, and the first token is on the host."""

    load_s: float  # of the file alone
    decode_path: str  # "fused", "general" (both the engine's), "jit" (tinygrad.llm's)
    included: str  # what a timed region of that path holds, for people
    chunk: int | None  # prompt tokens that go through at once; None: all
    compile_s: float = 0.0  # inside the compilers, since the process started
    kernels_compiled: int = 0


@dataclass(frozen=True)
class WarmUp:
    """Run a case until nothing is compiled or captured any more."""

    case: Case
    text: str = ""  # the prompt of a case that has one


@dataclass(frozen=True)
class WarmedUp:
    """Cost of getting a case ready: its kernels are compiled and its graphs captured."""

    seconds: float = 0.0
    repetition_s: float = 0.0  # of which a whole repetition, depth and preparation included
    compile_s: float = 0.0
    kernels_compiled: int = 0
    kernels_per_token: int | None = None  # of a decoded token, those in graphs included
    launches_per_token: int | None = None  # calls that the host makes for them
    type_k: str | None = None
    type_v: str | None = None


@dataclass(frozen=True)
class Measure:
    """Run one timed repetition; `seed` draws the token ids."""

    case: Case
    seed: int
    text: str = ""


@dataclass(frozen=True)
class Prepare:
    """Make a case of the suite ready: its input, the check of its result, its warm-up.

    A case of which one call takes longer than `max_call_s` is left out.
    """

    case: SuiteCase
    seed: int
    max_call_s: float
    repetitions: int  # of the whole run: what lasts a given time is spread over them


@dataclass(frozen=True)
class Prepared(WarmedUp):
    """A case's repetition, or the reason for leaving the case out."""

    left_out: str | None = None
    work: float = 0.0  # units of work in a repetition
    calls: int = 0  # that a repetition makes
    flops: float = 0.0  # of a repetition; 0: does not compute
    n_bytes: float = 0.0  # that a repetition must move in device memory; 0: not known
    peak_flops: float | None = None  # what the device can do at most a second, in this type
    check: str = ""  # what the check of the result has found
    included: str = ""  # what the timed region holds, for people
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Repeat:
    """Run one timed repetition of the case with this label."""

    label: str
    seed: int


@dataclass(frozen=True)
class Measured:
    """One sample; None is what an engine does not say."""

    ns: int
    # When the timed region ended: CLOCK_MONOTONIC, the same in every process.
    ended_s: float | None = None
    peak_device_bytes: int | None = None
    peak_rss_bytes: int | None = None
    kernels_compiled: int = 0  # inside the timed region; must be 0
    extra: dict[str, Any] = field(default_factory=dict)  # what this benchmark alone measures


@dataclass(frozen=True)
class Generate:
    """Decode greedily from each prompt; tokens and logits go into the npz file `out`."""

    load: Load
    prompts: list[list[int]]
    n_tokens: int
    out: str


@dataclass(frozen=True)
class Generated:
    """The file is written."""


@dataclass(frozen=True)
class Said:
    """Progress of a request, in words, before its answer."""

    text: str


@dataclass(frozen=True)
class Failed:
    """The request raised; the worker lives on, or ends if it cannot."""

    error: str  # one line: exception type and message
    traceback: str = field(repr=False, default="")


Request = Open | MeasureBandwidth | Load | WarmUp | Measure | Prepare | Repeat | Generate
Reply = Identity | Bandwidth | Loaded | WarmedUp | Measured | Prepared | Generated
Message = Request | Reply | Said | Failed

_MESSAGES: dict[str, type[Any]] = {
    message.__name__: message for message in (*get_args(Request), *get_args(Reply), Said, Failed)
}


def encode(message: Message) -> str:
    """Return the one line, without its newline, that carries `message`."""
    return json.dumps({"type": type(message).__name__, **asdict(message)})


def decode(line: str) -> Message:
    """Return the message that `line` carries; raises ValueError for anything else."""
    try:
        fields = json.loads(line)
        message = _MESSAGES[fields.pop("type")]
        if "case" in fields:
            pairs = {name: value for name, value in fields["case"].items() if type(value) is list}
            whole = fields["case"] | {name: tuple(map(tuple, pairs[name])) for name in pairs}
            fields["case"] = (SuiteCase if message is Prepare else Case)(**whole)
        if "load" in fields:
            fields["load"] = Load(**fields["load"])
        decoded: Message = message(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:200]!r}") from error
    return decoded
