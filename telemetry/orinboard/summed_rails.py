"""The rails that are summed as a machine's power, and what that holds and leaves out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from orinboard.readings import Rail

#: The rails that feed the AGX Orin module from outside. VDDQ_VDD2_1V8AO is fed from one of them and
#: would be counted twice (NVIDIA, Jetson Linux, "Platform Power and Performance"). Some published
#: figures add it all the same: 5 W of 42 while a language model decodes.
AGX_ORIN_INPUTS = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
#: AGX Xavier: the regulators' inputs, each from one of the module's two supplies (NVIDIA, Jetson
#: AGX Xavier Series Product Design Guide, 5.6.2).
AGX_XAVIER_INPUTS = ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")
#: The whole module's input on Orin NX and Nano, and on Xavier NX.
MODULE_INPUT = "VDD_IN"
#: Thor's input has a chip of its own, an INA238 on the carrier board, whose rail is called so.
THOR_INPUT = "VIN"
#: Parts that a module's rails leave out, in the words that stand beside each figure.
MODULE_WORDS = "module, without carrier board and power supply"
AGX_ORIN_WORDS = f"{MODULE_WORDS}; the memory's VDDQ_VDD2_1V8AO is inside it and not added"
THOR_WORDS = "whole system at the carrier board's input, without power supply; more than a module"


@dataclass(frozen=True, slots=True)
class SummedRails:
    """The rails whose sum is the machine's power, by key, and what they measure in words.

    `module` says that it is a Jetson module's whole power.
    """

    words: str
    rails: tuple[str, ...]
    module: bool = False


def unique_rail_keys(rails: Sequence[Rail]) -> tuple[str, ...]:
    """A name for each rail that is its own: two of one name are told apart by the device."""
    return _cached_rail_keys(tuple((rail.name, rail.device) for rail in rails))


def rails_by_key(rails: Sequence[Rail]) -> dict[str, Rail]:
    """The rails, each under the name that is its own."""
    return dict(zip(unique_rail_keys(rails), rails, strict=True))


@lru_cache(maxsize=64)
def _cached_rail_keys(identities: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    names = Counter(name for name, _ in identities)
    keys = [name if names[name] == 1 else f"{name}@{device}" for name, device in identities]
    twice = Counter(keys)
    return tuple(key if twice[key] == 1 else f"{key}#{number}" for number, key in enumerate(keys))


def find_rails_to_sum(rails: Sequence[Rail], choice: tuple[str, ...] = ()) -> SummedRails | None:
    """The rails that count; None where nobody knows which, and then there is no sum.

    `choice` names them (`VDD_IN`, or `VIN@1-0041` where two share a name) and is obeyed as it is.
    """
    return _cached_rails_to_sum(
        tuple((rail.name, rail.device, rail.chip) for rail in rails), choice
    )


@lru_cache(maxsize=64)
def _cached_rails_to_sum(
    identities: tuple[tuple[str, str, str], ...], choice: tuple[str, ...]
) -> SummedRails | None:
    rails = tuple(Rail(name, device, chip=chip) for name, device, chip in identities)
    keys = unique_rail_keys(rails)
    if choice:
        there = set(choice) <= set(keys)
        return SummedRails(f"the chosen rails {', '.join(choice)}", choice) if there else None
    if MODULE_INPUT in keys:
        return SummedRails(MODULE_WORDS, (MODULE_INPUT,), module=True)
    if set(AGX_ORIN_INPUTS) <= set(keys):
        return SummedRails(AGX_ORIN_WORDS, AGX_ORIN_INPUTS, module=True)
    if set(AGX_XAVIER_INPUTS) <= set(keys):
        return SummedRails(MODULE_WORDS, AGX_XAVIER_INPUTS, module=True)
    by_chip = {
        chip: tuple(key for key, rail in zip(keys, rails, strict=True) if rail.chip == chip)
        for chip in ("ina238", "nvml", "rapl")
    }
    if by_chip["ina238"] == (THOR_INPUT,):
        return SummedRails(THOR_WORDS, (THOR_INPUT,), module=True)
    if any(rail.chip == "ina3221" for rail in rails):
        return None
    if by_chip["nvml"]:
        one = len(by_chip["nvml"]) == 1
        words = "graphics card, without processor, memory and power supply"
        return SummedRails(words, by_chip["nvml"]) if one else None
    if by_chip["rapl"]:
        # Packages and their memory are apart from each other (kernel, power/powercap).
        return SummedRails("processors and their memory, without the rest", by_chip["rapl"])
    return None


def require_known_rails(choice: Sequence[str], rails: Sequence[Rail]) -> None:
    """Raises ValueError, with the names that there are, if one of `choice` is no rail's."""
    keys = unique_rail_keys(rails)
    for name in choice:
        if name not in keys:
            there = ", ".join(keys) or "none"
            raise ValueError(f"no rail is called {name!r}: there are {there}")


def module_watts(rails: Sequence[Rail]) -> float | None:
    """A Jetson module's power; None when it is not known or one of its rails gave no value."""
    whole = find_rails_to_sum(rails)
    if whole is None or not whole.module:
        return None
    watts = [rail.watts for key, rail in rails_by_key(rails).items() if key in whole.rails]
    known = [value for value in watts if value is not None]
    return sum(known) if len(known) == len(watts) else None
