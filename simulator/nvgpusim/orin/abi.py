"""The tables of abi.json: request numbers, byte offsets and constants, by driver generation."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class FieldLayout:
    """Position of one member: bytes [offset, offset + size), perhaps only some bits of them."""

    offset: int
    size: int
    signed: bool
    bit_offset: int = 0
    bit_size: int = 0


@dataclass(frozen=True)
class StructLayout:
    """A struct of the uapi headers."""

    name: str
    size: int
    fields: dict[str, FieldLayout]


@dataclass(frozen=True)
class Ioctl:
    """A request: `number` = dir << 30 | size << 16 | type << 8 | nr (asm-generic)."""

    name: str
    number: int
    arg: str | None

    @functools.cached_property
    def short_name(self) -> str:
        """The name without the headers' prefixes: what reports and --inject use."""
        name = self.name
        for prefix in ("NVGPU_IOCTL_CHANNEL_", "NVGPU_GPU_IOCTL_", "NVGPU_AS_IOCTL_"):
            name = name.removeprefix(prefix)
        for prefix in ("NVGPU_TSG_IOCTL_", "NVGPU_IOCTL_TSG_", "NVMAP_IOC_", "NVGPU_EVENT_IOCTL_"):
            name = name.removeprefix(prefix)
        kind = {"H": "CHANNEL", "A": "AS", "T": "TSG", "N": "NVMAP"}.get(ioc_type(self.number))
        return f"{kind}_{name}" if kind else name


def ioc_dir(request: int) -> int:
    """Direction bits: 1 the kernel reads, 2 it writes."""
    return request >> 30 & 3


def ioc_size(request: int) -> int:
    """Size of the argument struct in bytes."""
    return request >> 16 & 0x3FFF


def ioc_type(request: int) -> str:
    """The letter of the driver."""
    return chr(request >> 8 & 0xFF)


def ioc_nr(request: int) -> int:
    """The number within the letter."""
    return request & 0xFF


class StructBytes:
    """A struct in a bytearray, read and written by member name."""

    def __init__(self, struct: StructLayout, raw: bytearray | None = None) -> None:
        self.struct = struct
        self.raw = bytearray(struct.size) if raw is None else raw

    def __getitem__(self, name: str) -> int:
        f = self.struct.fields[name]
        data = self.raw[f.offset : f.offset + f.size]
        if f.bit_size:
            return int.from_bytes(data, "little") >> f.bit_offset & ((1 << f.bit_size) - 1)
        return int.from_bytes(data, "little", signed=f.signed)

    def __setitem__(self, name: str, value: int) -> None:
        f = self.struct.fields[name]
        masked = value & ((1 << 8 * f.size) - 1)
        self.raw[f.offset : f.offset + f.size] = masked.to_bytes(f.size, "little")

    def __contains__(self, name: str) -> bool:
        return name in self.struct.fields

    def integer_members(self) -> dict[str, int]:
        """Every member that is a number."""
        return {n: self[n] for n, f in self.struct.fields.items() if f.size <= 8}


class Abi:
    """One generation of the interface: `profile` is r35, r36, r38 or r39."""

    def __init__(self, profile: str) -> None:
        table: dict[str, Any] = json.loads(files(__package__).joinpath("abi.json").read_text())
        newer = table["variants"].get(profile, {})
        variant = table["variants"].get(newer.get("like", profile), {})
        self.profile = profile
        self.constants: dict[str, int] = table["constants"] | variant.get("constants", {})
        structs = table["structs"] | variant.get("structs", {})
        for name, more in newer.get("appended", {}).items():
            structs[name] = more | {"fields": structs[name]["fields"] | more["fields"]}
        self.structs = {
            name: StructLayout(
                name, s["size"], {f: _field_from_json(v) for f, v in s["fields"].items()}
            )
            for name, s in structs.items()
        }
        ioctls = table["ioctls"] | variant.get("ioctls", {})
        self.ioctls = {
            name: Ioctl(name, i["number"], i["arg"])
            for name, i in ioctls.items()
            if name not in variant.get("missing", ())
        }
        self.by_number = {i.number: i for i in self.ioctls.values()}
        self.last = {
            "G": self.constants["NVGPU_GPU_IOCTL_LAST"],
            "A": self.constants["NVGPU_AS_IOCTL_LAST"],
            "T": self.constants["NVGPU_TSG_IOCTL_LAST"],
            "H": self.constants["NVGPU_IOCTL_CHANNEL_LAST"],
            "E": self.constants["NVGPU_EVENT_IOCTL_LAST"],
            "N": self.constants["NVMAP_IOC_MAXNR"],
        }
        self.max_size = {
            "G": self.constants["NVGPU_GPU_IOCTL_MAX_ARG_SIZE"],
            "A": self.constants["NVGPU_AS_IOCTL_MAX_ARG_SIZE"],
            "T": self.constants["NVGPU_TSG_IOCTL_MAX_ARG_SIZE"],
            "H": self.constants["NVGPU_IOCTL_CHANNEL_MAX_ARG_SIZE"],
            "E": self.constants["NVGPU_EVENT_IOCTL_MAX_ARG_SIZE"],
        }

    def make_struct(self, name: str, raw: bytes | None = None) -> StructBytes:
        """A zeroed (or given) struct `name`; raises KeyError for an unknown one."""
        return StructBytes(self.structs[name], None if raw is None else bytearray(raw))

    def ioctl_name(self, request: int) -> str:
        """The ioctl's short name, or its parts when the tables do not have it."""
        known = self.by_number.get(request)
        if known:
            return known.short_name
        letter, nr = ioc_type(request), ioc_nr(request)
        return f"{request:#010x} (type {letter!r} nr {nr} size {ioc_size(request)})"


def _field_from_json(values: list[Any]) -> FieldLayout:
    offset, size, sign, *bits = values
    return FieldLayout(offset, size, sign == "s", *bits)


@functools.cache
def abi_of_profile(profile: str) -> Abi:
    """The tables of a profile, read once."""
    return Abi(profile)
