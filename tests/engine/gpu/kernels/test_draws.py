"""Tokens drawn on the (emulated) GPU: the same as on the host, slot by slot."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.gpu import cuda_emulation
from tests.engine.gpu.kernels import chi_square
from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.choose.sampling import Sampling, sample_token
from orinllm.errors import BadInput
from orinllm.gpu.launch import LaunchGraph
from orinllm.gpu.sampler import DeviceSampler

CONTEXT, SLOTS = 256, 5
PLAIN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Machine:
    """The kernels behind logits of our own, in so many slots of a vocabulary."""

    def __init__(self, slots: int, vocabulary: int) -> None:
        self.slots = slots
        self._logits = Buffer("EMU", slots * vocabulary, dtypes.float32).allocate()
        self._state = Buffer("EMU", 2 * slots, dtypes.int32).allocate()
        self.draws = DeviceSampler(self._logits, self._state, slots, CONTEXT)
        self._graph = LaunchGraph("EMU", self.draws.launches)

    def draw(self, logits: NDArray[np.float32], positions: Sequence[int]) -> list[int]:
        """Draw a token for each slot's logits, which are those of the position before its own.

        -7 stands for what the head has left.
        """
        self._logits.copyin(memoryview(bytearray(np.ascontiguousarray(logits, np.float32))))
        state = np.array([*[-7] * self.slots, *positions], np.int32)
        self._state.copyin(memoryview(bytearray(state)))
        self._graph.start()
        self.draws.on_step_started()
        out = self._state.copyout(memoryview(bytearray(self._state.nbytes)))
        return list(map(int, np.frombuffer(out, np.int32)[: self.slots]))


@pytest.fixture(scope="module", autouse=True)
def emu() -> Iterator[None]:
    cuda_emulation.install()
    yield


def spread(vocabulary: int, seed: int = 3, scale: float = 2.5) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).normal(0, scale, vocabulary)
    return np.asarray(drawn, np.float32)


HOW = {
    "default": Sampling(),
    "issue": Sampling(temperature=0.7, top_p=0.95, top_k=40, min_p=0.05),
    "all": Sampling(temperature=1.0, **PLAIN),
    "top-p alone": Sampling(temperature=1.0, top_k=0, min_p=0, top_p=0.9),
    "top-k of many": Sampling(top_k=3000, top_p=0.9703, min_p=0),
    "top-k of hundreds": Sampling(top_k=700, top_p=1.0, min_p=0, temperature=2.0),
    "min-p alone": Sampling(top_k=0, top_p=1.0, min_p=0.02),
    "cold": Sampling(temperature=0.01),
    "hot": Sampling(temperature=100.0, top_k=50, top_p=1.0, min_p=0),
    "one": Sampling(top_k=1),
    "no mass": Sampling(top_p=0.0),
}


@cache
def machine_of(vocabulary: int) -> Machine:
    """One machine for all tests of a vocabulary: what a test leaves must not matter to others."""
    return Machine(SLOTS if vocabulary < 10_000 else 1, vocabulary)


def compare(logits: NDArray[np.float32], positions: Sequence[int]) -> None:
    """Demand the host's tokens in slot 0, for each way to sample; other slots are idle."""
    machine = machine_of(len(logits))
    idle = [-1] * (machine.slots - 1)
    rows = np.tile(logits, (machine.slots, 1))
    for name, how in HOW.items():
        machine.draws.set_sampling(0, how)
        for position in positions:
            want = sample_token(logits, how, [], position)
            got = machine.draw(rows, [position, *idle])
            assert (name, got) == (name, [want, *[-7] * len(idle)])


@pytest.mark.parametrize("vocabulary", [1, 33, 1003, 151_936, 262_144])
def test_the_hosts_tokens(vocabulary: int) -> None:
    compare(spread(vocabulary), (1, 200))


def test_ties() -> None:
    """Of equal logits the lower token is first: within a list, and where there are too many."""
    steps = np.round(spread(5003) * 2) / 2
    compare(np.asarray(steps, np.float32), (1, 2))
    compare(np.full(5003, -1.5, np.float32), (1,))
    zeros = np.zeros(5003, np.float32)
    zeros[::2] = -0.0  # equal to 0, and not less
    compare(zeros, (2,))


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.51, 0.75, 1.0])
@pytest.mark.parametrize("vocabulary", [33, 5003])
def test_top_p_at_its_borders(top_p: float, vocabulary: int) -> None:
    """Of four equal tokens, 0.5 keeps two and 0.51 three: a list, and what is too much for one."""
    machine = machine_of(vocabulary)
    logits = np.full((SLOTS, vocabulary), -60.0, np.float32)
    logits[:, -4:] = 3.0
    for slot in range(SLOTS):
        machine.draws.set_sampling(
            slot, Sampling(temperature=1.0, top_k=0, top_p=top_p, min_p=0.0, seed=slot)
        )
    drawn = {token for position in range(1, 8) for token in machine.draw(logits, [position] * 5)}
    kept = {0.25: 1, 0.5: 2, 0.51: 3, 0.75: 3, 1.0: 4}[top_p]
    assert drawn == set(range(vocabulary - 4, vocabulary - 4 + kept))


@pytest.mark.parametrize("vocabulary", [33, 5003])
def test_min_p_at_its_border(vocabulary: int) -> None:
    """All of it keeps the best and who is as good, no other."""
    machine = machine_of(vocabulary)
    logits = np.full((SLOTS, vocabulary), 2.5, np.float32)
    logits[:, -4:] = 3.0
    for slot in range(SLOTS):
        machine.draws.set_sampling(slot, Sampling(top_k=0, top_p=1.0, min_p=1.0, seed=slot))
    drawn = {token for position in range(1, 8) for token in machine.draw(logits, [position] * 5)}
    assert drawn == set(range(vocabulary - 4, vocabulary))


def test_a_seed_gives_its_token_in_any_slot() -> None:
    """Each slot has a request of its own; an idle one and greedy ones are left alone."""
    machine, logits = machine_of(1003), spread(SLOTS * 1003).reshape(SLOTS, 1003)
    how = [Sampling(seed=2**64 - 1), Sampling(top_k=0, seed=7), None, Sampling(seed=3), Sampling()]
    for slot, each in enumerate(how):
        machine.draws.set_sampling(slot, each)
    assert machine.draws.is_needed
    for positions in ([1, 2, 3, 4, -1], [200, 2, 5, 255, 0]):
        want = [
            -7 if each is None or position < 0 else sample_token(row, each, [], position)
            for row, each, position in zip(logits, how, positions, strict=True)
        ]
        assert machine.draw(logits, positions) == want
    for slot in range(SLOTS):
        machine.draws.set_sampling(slot, None)
    assert not machine.draws.is_needed


@pytest.mark.parametrize(
    "how",
    [
        Sampling(repeat_penalty=1.8, penalty_tokens=4, temperature=0.9),
        Sampling(frequency_penalty=0.7, presence_penalty=0.4, temperature=0.5),
        Sampling(temperature=0, repeat_penalty=1.3, frequency_penalty=0.2, penalty_tokens=9),
    ],
)
def test_penalties_count_what_was_drawn(how: Sampling) -> None:
    """Tokens are counted as they are drawn, and no longer once they leave the window."""
    logits, text = np.full(1003, -90.0, np.float32), [3, 3, 5]
    logits[:40] = spread(40, scale=1.0)
    machine, rows = machine_of(1003), np.tile(logits, (SLOTS, 1))
    for slot in range(SLOTS):
        machine.draws.set_sampling(slot, None)
    machine.draws.set_sampling(1, how)
    machine.draws.set_penalty_history(1, text)

    def drawn(position: int) -> int:
        left, token, *others = machine.draw(rows, [-1, position, 4, 4, 4])
        assert [left, *others] == [-7] * 4
        return token

    for _ in range(75):
        want = sample_token(logits, how, text, len(text))
        assert drawn(len(text)) == want
        text.append(want)
    assert len(set(text)) > 5
    machine.draws.set_sampling(1, how)  # another request: nothing counts
    assert drawn(9) == sample_token(logits, how, [], 9)


def test_biases() -> None:
    machine, logits = machine_of(1003), spread(1003)
    rows = np.tile(logits, (SLOTS, 1))
    how = Sampling(temperature=0, logit_bias={1002: 90.0, 7: 49.0})
    machine.draws.set_sampling(1, how)
    assert machine.draw(rows, [1] * 5)[1] == sample_token(logits, how, [], 1) == 1002
    machine.draws.set_sampling(1, Sampling(temperature=0, presence_penalty=1.0))
    assert machine.draw(rows, [1] * 5)[1] == logits.argmax()
    with pytest.raises(BadInput, match="logit_bias: token 1003 is not from 0 to 1002"):
        machine.draws.set_sampling(0, Sampling(logit_bias={1003: 1.0}))


def words(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


@pytest.mark.parametrize("vocabulary", [33, 5003])
def test_a_mask_holds_for_one_step(vocabulary: int) -> None:
    machine, logits = machine_of(vocabulary), np.tile(spread(vocabulary), (SLOTS, 1))
    how = Sampling(top_k=0, top_p=1.0, min_p=0.0)
    for slot in range(SLOTS):
        machine.draws.set_sampling(slot, how if slot == 0 else None)
    allowed = np.random.default_rng(1).random(vocabulary) < 0.3
    masked = np.where(allowed, logits[0], np.float32(-np.inf))
    for slot in (0, 1):
        machine.draws.set_token_mask(slot, words(allowed))

    def drawn(position: int) -> list[int]:
        return machine.draw(logits, [position] * SLOTS)[:3]

    # Slot 1 is greedy: the best of those allowed, and without a mask the head's.
    assert drawn(5) == [sample_token(masked, how, [], 5), masked.argmax(), -7]
    assert drawn(6) == [sample_token(logits[0], how, [], 6), -7, -7]
    only = np.arange(vocabulary) == vocabulary - 1
    for mask, want in ((only, vocabulary - 1), (only & False, -1)):
        for slot in (0, 1):
            machine.draws.set_token_mask(slot, words(mask))
        assert drawn(5) == [want, want, -7]
    machine.draws.set_token_mask(0, words(only))
    machine.draws.set_token_mask(0, None)
    assert drawn(6)[0] == sample_token(logits[0], how, [], 6)
    with pytest.raises(ValueError, match="a mask has"):
        machine.draws.set_token_mask(0, np.zeros(3 + vocabulary // 32, np.uint32))


def test_logits_that_are_no_numbers() -> None:
    """Minus infinity is never drawn; a NaN or plus infinity leaves no token, and no trace."""
    machine, logits = machine_of(1003), spread(1003)
    how = Sampling(top_k=0, top_p=1.0, min_p=0.0)
    machine.draws.set_sampling(0, how)

    def drawn(row: NDArray[np.float32]) -> int:
        return machine.draw(np.tile(row, (SLOTS, 1)), [3, -1, -1, -1, -1])[0]

    gone = logits.copy()
    gone[logits > 0] = -np.inf
    assert drawn(gone) == sample_token(gone, how, [], 3)
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = logits.copy()
        spoilt[7 if np.isnan(bad) or bad > 0 else slice(None)] = bad
        assert drawn(spoilt) == sample_token(spoilt, how, [], 3) == -1
        assert drawn(logits) == sample_token(logits, how, [], 3)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_many_draws(temperature: float) -> None:
    """1,000 positions at once, a slot each, are the host's; chi_square.py draws a million."""
    vocabulary, slots = 11, 1000
    logits = spread(vocabulary, seed=7, scale=1.2)
    how = Sampling(temperature=temperature, seed=5, **PLAIN)
    drawn = chi_square.draw("EMU", logits, how, range(1, slots + 1), threads=32)
    assert drawn.tolist() == [sample_token(logits, how, [], i) for i in range(1, slots + 1)]
    assert chi_square.statistic(logits, how, drawn) < chi_square.quantile(vocabulary - 1)


def test_chi_square_sees_a_wrong_temperature() -> None:
    logits = spread(11, seed=7, scale=1.2)
    how = Sampling(temperature=1.0, seed=5, **PLAIN)
    drawn = chi_square.draw("EMU", logits, how, range(1, 1001), threads=32)
    warm = Sampling(temperature=1.3, **PLAIN)
    assert chi_square.statistic(logits, warm, drawn) > chi_square.quantile(10)
