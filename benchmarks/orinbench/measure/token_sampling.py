"""Draws of a generation's tokens: at random, or as `--sampling` says.

That is text: temperature=0.7,top_p=0.95, fields of orinllm.choose.sampling.Sampling.
"""

from dataclasses import replace

from orinbench.errors import BenchError
from orinbench.measure.plan import Case
from orinllm.choose.sampling import Sampling
from orinllm.errors import BadInput

#: What a tg draws: one of the 40 most likely tokens, each nearly as likely as the others. A model's
#: own most likely ones repeat themselves after a few: a mixture then reads few of its experts.
RANDOM = Sampling(temperature=100, top_k=40, top_p=1, min_p=0)

_NUMBERS = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repeat_penalty", "frequency_penalty", "presence_penalty"), float),
    **dict.fromkeys(("top_k", "penalty_tokens", "seed"), int),
}


def parse_sampling(text: str) -> Sampling:
    """Return what a text says, defaults for the rest; raises BenchError for what means nothing."""
    values: dict[str, float | int] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in _NUMBERS or not equals:
            known = ", ".join(_NUMBERS)
            raise BenchError(f"--sampling {text}: '{part}' is no name=number; names: {known}")
        if name in values:
            raise BenchError(f"--sampling {text}: {name} is given twice; give it once")
        try:
            values[name] = _NUMBERS[name](value)
        except ValueError:
            raise BenchError(f"--sampling {text}: '{value}' is no number") from None
    try:
        how = Sampling(**values)  # type: ignore[arg-type]
    except BadInput as error:
        raise BenchError(f"--sampling {text}: {error}") from None
    return how


def case_samplings(case: Case, seed: int) -> list[Sampling]:
    """Return how each sequence of a case draws; a prompt without generation takes the best."""
    if case.sampling:
        how = parse_sampling(case.sampling)
    else:
        how = replace(RANDOM, seed=seed) if case.n_gen else Sampling(temperature=0)
    return [replace(how, seed=(how.seed + (i << 32)) % (1 << 64)) for i in range(case.n_parallel)]
