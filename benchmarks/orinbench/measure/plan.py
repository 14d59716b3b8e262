"""The plan of a run: backends, models, cases, and the order of the repetitions."""

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from orinbench.errors import BenchError
from orinbench.measure.number_lists import parse_int_list

# Contexts are rounded up to this, so that runs with a few tokens more or less share kernels.
CONTEXT_STEP = 256

TINYGRAD_DEVICES = ("NV", "CUDA", "CPU")
BACKEND_NAMES = (*(f"tinygrad:{device}" for device in TINYGRAD_DEVICES), "llama.cpp")


@dataclass(frozen=True)
class ListSetting:
    """A list-valued setting of llama-bench: its record field, its flags, its kind."""

    field: str
    flags: tuple[str, ...]
    integer: bool
    help: str
    minimum: int = 0
    maximum: int | None = None
    # Of a setting that is no number: what there is, or a pattern and what it is called.
    choices: tuple[str, ...] = ()
    form: tuple[str, str] | None = None


# `ggml_type_from_name` of llama-bench 0.5.0.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _switch_setting(field: str, help_text: str, *flags: str) -> ListSetting:
    return ListSetting(field, flags, True, f"{help_text}, 0 or 1", maximum=1)


def _choice_setting(field: str, *flags: str, choices: Sequence[str] = ()) -> ListSetting:
    return ListSetting(field, flags, False, f"One of {', '.join(choices)}", choices=tuple(choices))


_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
_MASK = (r"(0x)?[0-9a-fA-F]+", "number in hexadecimal")
_SHARES = (r"\d+(\.\d+)?(/\d+(\.\d+)?)*", "list of shares, as 3/1")
KNOBS = (
    ListSetting("n_batch", ("-b", "--batch-size"), True, "Logical batch", 1),
    ListSetting("n_ubatch", ("-ub", "--ubatch-size"), True, "Physical batch", 1),
    ListSetting(
        "type_k", ("-ctk", "--cache-type-k"), False, "Type of the K cache", choices=CACHE_TYPES
    ),
    ListSetting(
        "type_v", ("-ctv", "--cache-type-v"), False, "Type of the V cache", choices=CACHE_TYPES
    ),
    ListSetting("n_threads", ("-t", "--threads"), True, "CPU threads, also of tinygrad:CPU", 1),
    ListSetting("cpu_mask", ("-C", "--cpu-mask"), False, "CPU affinity mask", form=_MASK),
    _switch_setting("cpu_strict", "Strict CPU placement", "--cpu-strict"),
    ListSetting("poll", ("--poll",), True, "Polling level, 0 to 100", maximum=100),
    ListSetting("n_gpu_layers", ("-ngl", "--n-gpu-layers"), True, "Layers on the GPU", -1),
    ListSetting("n_cpu_moe", ("-ncmoe", "--n-cpu-moe"), True, "MoE layers kept on the CPU"),
    _choice_setting(
        "split_mode", "-sm", "--split-mode", choices=("none", "layer", "row", "tensor")
    ),
    ListSetting("main_gpu", ("-mg", "--main-gpu"), True, "Index of the main GPU"),
    _switch_setting("no_kv_offload", "KV cache stays on the CPU", "-nkvo", "--no-kv-offload"),
    _choice_setting("flash_attn", "-fa", "--flash-attn", choices=("on", "off", "auto", "0", "1")),
    ListSetting("devices", ("-dev", "--device"), False, "Devices, separated by /"),
    _choice_setting("load_mode", "-lm", "--load-mode", choices=_LOAD_MODES),
    _choice_setting("lazy_mode", "-lzm", "--lazy-mode", choices=("on", "auto", "off")),
    _switch_setting("use_mmap", "Older spelling of -lm", "-mmp", "--mmap"),
    _switch_setting("embeddings", "Compute embeddings", "-embd", "--embeddings"),
    ListSetting(
        "tensor_split", ("-ts", "--tensor-split"), False, "Shares of the GPUs", form=_SHARES
    ),
    ListSetting(
        "tensor_buft_overrides", ("-ot", "--override-tensor"), False, "Placement of tensors"
    ),
    _switch_setting("no_op_offload", "Offload no operations", "-nopo", "--no-op-offload"),
    _switch_setting("no_host", "No host buffers", "--no-host"),
    _switch_setting("repack", "Repack weights on the CPU", "--repack"),
    ListSetting("fit_target", ("-fitt", "--fit-target"), True, "MiB to leave free on a device"),
    ListSetting("fit_min_ctx", ("-fitc", "--fit-ctx"), True, "Minimum context that must fit"),
)
KNOB_BY_FIELD = {knob.field: knob for knob in KNOBS}
# Types of keys and values that the fused kernels know: where both knobs name the same one.
KEY_TYPES = ("f16", "q8_0")

Settings = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True)
class Case:
    """One row of llama-bench: a test under one combination of knobs."""

    n_prompt: int
    n_gen: int
    n_depth: int
    settings: Settings = ()
    sms: int | None = None  # multiprocessors of the GPU; None: all
    text: bool = False  # the prompt is a text, and the first of the answer's is waited for
    sampling: str = ""  # how tokens are drawn (token_sampling.py); empty: at random
    n_parallel: int = 1  # sequences that are decoded at once
    picture: str = ""  # its size, as 640x480: is encoded, or with `text` seen before a question
    encoder: str = ""  # of the picture (pictures.py)
    benchmark: ClassVar[str] = "llama-bench"
    unit: ClassVar[str] = "tok/s"

    @property
    def label(self) -> str:
        """The test in llama-bench's words: pp512, tg128, pp512+tg128, with @ d512 at a depth.

        ttft512 is ours: the time from a text of 512 tokens to the first text of the answer. Several
        sequences at once are tg128 npl8. img640x480 is a picture's encoding.
        """
        parts = [f"{'ttft' if self.text else 'pp'}{self.n_prompt}"] * (self.n_prompt > 0)
        if self.picture:
            parts = [f"{'ttft ' if self.text else ''}img{self.picture}"]
        parts += [f"tg{self.n_gen}"] * (self.n_gen > 0)
        depth = f" npl{self.n_parallel}" if self.n_parallel > 1 else ""
        depth += f" @ d{self.n_depth}" if self.n_depth else ""
        drawn = f" @ {self.sampling}" if self.sampling else ""
        return "+".join(parts) + depth + drawn + (f" @ {self.sms} SMs" if self.sms else "")

    @property
    def is_picture_encoding(self) -> bool:
        """Say whether a picture's encoding alone is timed, and no token."""
        return bool(self.picture) and not self.text

    @property
    def n_tokens(self) -> int:
        """Tokens that the timed region processes."""
        return self.n_prompt + self.n_gen * self.n_parallel

    @property
    def context_length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.n_depth + self.n_prompt + self.n_gen


@dataclass(frozen=True)
class SuiteCase:
    """One row of another benchmark: a label, and what its module makes the work from.

    Cases of one `family` differ in size alone; `cost` is how their times relate, 0 where that is
    not known. From it and a smaller case the worker knows which ones would take too long.
    """

    benchmark: str
    unit: str  # what the work is counted in a second: more is better
    label: str
    parameters: Settings
    family: str = ""
    cost: float = 0.0
    settings: ClassVar[Settings] = ()  # no knobs of llama-bench


AnyCase = Case | SuiteCase


@dataclass(frozen=True)
class Lane:
    """The cases of a backend, and with llama-bench of a model: served by a process at a time."""

    backend: str  # one of BACKEND_NAMES, tinygrad's with an optional :RENDERER behind
    cases: tuple[AnyCase, ...]
    model: Path | None = None
    n_threads: int | None = None
    key_type: str = "f16"  # of tinygrad's keys and values, on a GPU
    variables: tuple[tuple[str, str], ...] = ()  # of tinygrad's environment, swept by --env
    mmproj: Path | None = None  # by which the model sees

    @property
    def name(self) -> str:
        """The backend and its variables: tinygrad:CPU BEAM=2."""
        return " ".join([self.backend, *(f"{name}={value}" for name, value in self.variables)])

    @property
    def device(self) -> str | None:
        """tinygrad's DEV, e.g. "CPU" or "CUDA:PTX"; None for llama.cpp."""
        return self.backend.removeprefix("tinygrad:") if self.is_tinygrad else None

    @property
    def is_tinygrad(self) -> bool:
        """True if tinygrad runs it."""
        return self.backend.startswith("tinygrad:")

    @property
    def llama_bench_cases(self) -> tuple[Case, ...]:
        """The cases of llama-bench among them."""
        return tuple(case for case in self.cases if isinstance(case, Case))

    @property
    def max_context(self) -> int:
        """The context that all of llama-bench's cases fit in, in steps of CONTEXT_STEP tokens."""
        need = max(case.context_length for case in self.llama_bench_cases)
        return -(-need // CONTEXT_STEP) * CONTEXT_STEP

    @property
    def most_sequences(self) -> int:
        """Sequences at once, at most."""
        return max(case.n_parallel for case in self.llama_bench_cases)


@dataclass(frozen=True)
class Plan:
    """All that one run does: so many rounds, spread over so many fresh processes of each lane."""

    lanes: tuple[Lane, ...]
    repetitions: int
    seed: int
    processes: int = 1

    def process_of_round(self, round_: int) -> int:
        """Return the process, from 0, that serves a round."""
        return round_ * min(self.processes, self.repetitions) // self.repetitions


@dataclass(frozen=True)
class PlannedRepetition:
    """One repetition: which round, lane and case."""

    round: int
    lane: int
    case: int


def make_tests(
    n_prompt: Sequence[int],
    n_gen: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depths: Sequence[int],
    parallel: Sequence[int] = (1,),
) -> list[Case]:
    """Return each test without settings, in llama-bench's order, without repeats.

    A zero in `n_prompt` or `n_gen` leaves that test out; `n_gen` alone is for each of `parallel`.
    """
    tests = [
        test
        for depth in depths
        for test in (
            *(Case(n, 0, depth) for n in n_prompt if n),
            *(Case(0, n, depth, n_parallel=many) for n in n_gen if n for many in parallel),
            *(Case(prompt, gen, depth) for prompt, gen in pairs),
        )
    ]
    return list(dict.fromkeys(tests))


def parse_settings(given: Mapping[str, Sequence[str]]) -> list[Settings]:
    """Return each combination of the knobs in `given` (record field -> values as typed)."""
    axes: list[list[tuple[str, str | int]]] = []
    for field, texts in given.items():
        if not texts:
            continue
        knob = KNOB_BY_FIELD[field]
        values: list[str | int] = []
        for text in texts:
            if knob.integer:
                values += parse_int_list(text, knob.flags[0], knob.minimum, knob.maximum)
            else:
                values += [_checked_value(knob, value, text) for value in text.split(",") if value]
        if not values:
            raise BenchError(f"{knob.flags[0]}: no value given")
        axes.append([(field, value) for value in values])
    return [tuple(combination) for combination in itertools.product(*axes)]


def _checked_value(knob: ListSetting, value: str, text: str) -> str:
    where = f"{knob.flags[0]} {text}: '{value}' is"
    if knob.choices and value not in knob.choices:
        raise BenchError(f"{where} none of {', '.join(knob.choices)}")
    if knob.form and not re.fullmatch(knob.form[0], value):
        raise BenchError(f"{where} no {knob.form[1]}")
    return value


def make_lanes(
    backends: Sequence[str],
    models: Sequence[Path],
    tests: Sequence[Case],
    settings: Sequence[Settings],
    texts: Sequence[int] = (),
    sms: int | None = None,
    sampling: Sequence[str] = (),
) -> tuple[Lane, ...]:
    """Return one lane per backend and model, and per thread count where tinygrad:CPU runs.

    `texts` are tokens of the prompts whose first text is timed, `sms` multiprocessors; each of
    `sampling` is a case more of tinygrad's for every test with a generation. Knobs that mean
    nothing to tinygrad do not multiply its cases.
    """
    lanes: dict[Lane, dict[Case, None]] = {}  # lanes without their cases, and these
    cases = [replace(test, sms=sms) for test in tests]
    cases += [Case(n, 0, 0, sms=sms, text=True) for n in texts]
    for backend, model in itertools.product(backends, models):
        for combination, case in itertools.product(settings, cases):
            lane = Lane(backend, (), model)
            ways = [case]
            if lane.is_tinygrad:
                ways += [replace(case, sampling=text) for text in sampling if case.n_gen]
                threads = dict(combination).get("n_threads")
                if not backend.startswith("tinygrad:CPU"):
                    lane = replace(lane, key_type=kv_cache_type(dict(combination)))
                elif threads is not None:
                    lane = replace(lane, n_threads=int(threads))
                combination = ()
            for way in ways:
                lanes.setdefault(lane, {})[replace(way, settings=combination)] = None
    return tuple(replace(lane, cases=tuple(of)) for lane, of in lanes.items())


def parse_variables(texts: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """Return each combination of the variables of --env NAME=VALUE,VALUE...

    Raises BenchError for a text that is none, and for what the bench sets itself.
    """
    axes: dict[str, list[tuple[str, str]]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier() or not all(values.split(",")):
            raise BenchError(f"--env {text}: is no NAME=VALUE,VALUE,..., such as BEAM=0,2,4")
        if name in ("DEV", "CACHEDB"):
            flag = {"DEV": "--backend or --device", "CACHEDB": "--kept"}[name]
            raise BenchError(f"--env {text}: {name} is what {flag} says")
        if name in axes:
            raise BenchError(f"--env {text}: {name} was given before; give all its values at once")
        axes[name] = [(name, value) for value in dict.fromkeys(values.split(","))]
    return list(itertools.product(*axes.values()))


def lanes_for_each_environment(lanes: Sequence[Lane], texts: Sequence[str]) -> tuple[Lane, ...]:
    """Return each lane of tinygrad once for each combination of --env, the others as they are."""
    combinations = parse_variables(texts)
    return tuple(
        replace(lane, variables=variables)
        for lane in lanes
        for variables in (combinations if lane.is_tinygrad else [()])
    )


def kv_cache_type(settings: Mapping[str, object]) -> str:
    """Return the type of tinygrad's keys and values: what -ctk and -ctv both say, if it is known.

    Else it is f16, and the knobs are recorded as ignored.
    """
    given = {settings.get("type_k"), settings.get("type_v")}
    return next((name for name in KEY_TYPES if given == {name}), KEY_TYPES[0])


def planned_repetitions(plan: Plan) -> Iterator[PlannedRepetition]:
    """Yield every repetition: in each round each case of each lane once, shuffled by the seed.

    Rounds make pairs of backends comparable (they saw the same minute of the machine); shuffling
    keeps a drift from falling on the same case each time.
    """
    draw = random.Random(plan.seed)
    for round_ in range(plan.repetitions):
        steps = [
            PlannedRepetition(round_, lane, case)
            for lane, lane_plan in enumerate(plan.lanes)
            for case in range(len(lane_plan.cases))
        ]
        draw.shuffle(steps)
        yield from steps


def is_backend_name(name: str) -> bool:
    """Return whether `name` is a backend: one of BACKEND_NAMES, or tinygrad's with a renderer."""
    if name in BACKEND_NAMES:
        return True
    parts = name.split(":")
    return (
        len(parts) == 3 and ":".join(parts[:2]) in BACKEND_NAMES and parts[2].isidentifier()
    )  # fmt: skip
