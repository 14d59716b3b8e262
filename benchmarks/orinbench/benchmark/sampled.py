"""Sampling as text: temperature=0.7,top_p=0.95, the fields of `orinllm.sampling.Sampling`."""

from orinbench.errors import BenchError
from orinllm.errors import BadInput
from orinllm.sampling import Sampling

_NUMBERS = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repeat_penalty", "frequency_penalty", "presence_penalty"), float),
    **dict.fromkeys(("top_k", "penalty_tokens", "seed"), int),
}


def sampling_of(text: str) -> Sampling:
    """Return what a text says, defaults for the rest; raises BenchError for what means nothing."""
    values: dict[str, float | int] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in _NUMBERS or not equals:
            known = ", ".join(_NUMBERS)
            raise BenchError(f"--sampling {text}: '{part}' is no name=number; names: {known}")
        try:
            values[name] = _NUMBERS[name](value)
        except ValueError:
            raise BenchError(f"--sampling {text}: '{value}' is no number") from None
    try:
        how = Sampling(**values)  # type: ignore[arg-type]
    except BadInput as error:
        raise BenchError(f"--sampling {text}: {error}") from None
    if how.greedy:
        raise BenchError(f"--sampling {text}: takes the most likely token, as tg does without it")
    return how
