"""Prove that every vector load and store of PTX is aligned, whatever the threads do.

    ptx_alignment.py FILE.ptx...

A v2 or v4 access must have an address that is a multiple of its whole size; else the GPU faults
(CUDA error 716). Each register gets the largest power of two that divides all values it can have,
from its definitions alone. Both of tinygrad's NVIDIA renderers end in PTX: PTXRenderer writes it,
and NVRTC makes it of CUDA C, where a cast to float4 becomes a v4 access.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# A power of two that no address needs to exceed; also what zero is divisible by.
TOP = 1 << 16
# Alignment of the start of any allocation (CUDA C Programming Guide, device memory accesses).
ALLOCATION = 256

_ACCESS = re.compile(r"(ld|st)\.(?:\w+\.)*?v([24])\.[bufs](\d+)$")
_STATEMENT = re.compile(r"(@!?%\S+\s+)?([a-z][\w.:]*)\s+(.+)", re.DOTALL)
_REGISTER = re.compile(r"%[\w$.]+")
# Stands where a label was: others may jump there.
_LABEL = "label"
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w+\s+([\w$]+)\s*\[")


@dataclass(frozen=True)
class Access:
    """One vector access: the statement, the bytes it moves, what divides its address."""

    kernel: str
    statement: str
    size: int
    alignment: int

    @property
    def aligned(self) -> bool:
        """True if the address is provably a multiple of the size."""
        return self.alignment % self.size == 0


def divisor(value: int) -> int:
    """The largest power of two, TOP at most, that divides a number."""
    return min(value & -value, TOP) if value else TOP


class Alignment:
    """The divisors of the registers of one kernel.

    Args:
        statements: opcode and operands, in order.
        symbols: alignment of parameters and shared arrays, by name.
    """

    def __init__(
        self, statements: Sequence[tuple[str, list[str]]], symbols: Mapping[str, int]
    ) -> None:
        self.symbols = symbols
        self.registers: dict[str, int] = {}
        self.constants = _constants(statements)
        # From above: each register starts divisible by everything, and falls until all
        # definitions agree. Loops end because divisors only fall.
        changed = True
        while changed:
            changed = False
            for opcode, operands in statements:
                for target in self.targets(opcode, operands):
                    new = min(self.registers.get(target, TOP), self._result(opcode, operands))
                    changed |= new != self.registers.get(target)
                    self.registers[target] = new

    def of(self, operand: str) -> int:
        """The divisor of an operand: a register, a number, a symbol."""
        operand = operand.strip()
        if operand.startswith("%"):
            special = operand.startswith(("%tid", "%ctaid", "%ntid", "%nctaid", "%laneid"))
            return 1 if special else self.registers.get(operand, TOP)
        if re.fullmatch(r"-?\d+U?", operand):
            return divisor(int(operand.rstrip("U")))
        if re.fullmatch(r"0[xX][0-9a-fA-F]+U?", operand):
            return divisor(int(operand.rstrip("U"), 16))
        return self.symbols.get(operand.removesuffix("[0]"), 1)

    def address(self, operand: str) -> int:
        """The divisor of '[base+offset]'."""
        base, _, offset = operand.strip()[1:-1].partition("+")
        return min(self.of(base), self.of(offset) if offset else TOP)

    def _count(self, operand: str) -> int | None:
        text = self.constants.get(operand.strip(), operand.strip()).rstrip("U")
        return int(text) if text.isdecimal() else None

    @staticmethod
    def targets(opcode: str, operands: list[str]) -> list[str]:
        """The registers that a statement writes."""
        if opcode.split(".")[0] in ("st", "bra", "bar", "ret", "red", "membar", _LABEL):
            return []
        return _REGISTER.findall(operands[0]) if operands else []

    def _result(self, opcode: str, operands: list[str]) -> int:
        name, *rest = opcode.split(".")
        a = [self.of(o) for o in operands[1:]]
        if rest and rest[-1][0] == "f" and rest[-1] != "f":
            return 1
        match name:
            case "ld" if "param" in rest and not _ACCESS.match(opcode):
                return self.symbols.get(operands[1].strip()[1:-1].split("+")[0], 1)
            case "mov" | "cvta" | "neg" | "abs":
                return a[0]
            case "cvt":
                return 1 if any(r[0] == "f" for r in rest) else a[0]
            case "add" | "sub" | "or" | "xor" | "min" | "max":
                return min(a[0], a[1])
            case "and":
                return max(a[0], a[1])  # a low zero bit of either is one of the result
            case "mul":
                return 1 if "hi" in rest else min(a[0] * a[1], TOP)
            case "mad":
                return 1 if "hi" in rest else min(min(a[0] * a[1], TOP), a[2])
            case "shl" | "shr":
                count = self._count(operands[2])
                if count is None:
                    return 1
                return min(a[0] << count, TOP) if name == "shl" else max(a[0] >> count, 1)
            case "selp":
                return min(a[0], a[1])
            case _:
                return 1


def _constants(statements: Sequence[tuple[str, list[str]]]) -> dict[str, str]:
    """The registers whose one definition is a number."""
    written = [o[0].strip() for opcode, o in statements if not opcode.startswith(("st", "bra"))]
    return {
        o[0].strip(): o[1].strip()
        for opcode, o in statements
        if opcode.startswith("mov")
        and re.fullmatch(r"\d+U?", o[1].strip())
        and written.count(o[0].strip()) == 1
    }


def _one_name_a_value(
    statements: Sequence[tuple[str, list[str]]], conditional: Sequence[bool]
) -> list[tuple[str, list[str]]]:
    """Rename registers that are written again before anyone else can read them.

    tinygrad 0.14.0 computes an index and its address in one register. Between two labels or jumps,
    a value that a later statement overwrites gets a name of its own; the last one keeps the
    register's, because other blocks read it.
    """
    renamed: list[tuple[str, list[str]]] = []
    start = 0
    for i in range(len(statements) + 1):
        if i == len(statements) or statements[i][0].split(".")[0] in ("bra", _LABEL):
            block = [(opcode, [*operands]) for opcode, operands in statements[start : i + 1]]
            renamed += _renamed_block(block, conditional[start : i + 1], start)
            start = i + 1
    return renamed


def _renamed_block(
    block: list[tuple[str, list[str]]], conditional: Sequence[bool], first: int
) -> list[tuple[str, list[str]]]:
    writes: dict[str, list[int]] = {}
    for i, (opcode, operands) in enumerate(block):
        for target in Alignment.targets(opcode, operands):
            writes.setdefault(target, []).append(i)
    # A conditional write leaves the earlier value to be read.
    again = {t: w for t, w in writes.items() if len(w) > 1 and not any(conditional[i] for i in w)}
    names: dict[str, str] = {}
    for i, (opcode, operands) in enumerate(block):
        n_targets = 1 if Alignment.targets(opcode, operands) else 0
        for at in range(n_targets, len(operands)):
            operands[at] = _REGISTER.sub(lambda m: names.get(m[0], m[0]), operands[at])
        for target in Alignment.targets(opcode, operands):
            if target in again:
                names[target] = target if i == again[target][-1] else f"{target}.{first + i}"
        if n_targets:
            operands[0] = _REGISTER.sub(lambda m: names.get(m[0], m[0]), operands[0])
    return block


def _split(operands: str) -> list[str]:
    """Split at commas outside braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", operands)]


def accesses(ptx: str, parameters: Mapping[int, int] | None = None) -> list[Access]:
    """The vector accesses of every kernel in a PTX module, with what is known of their addresses.

    Args:
        ptx: the module's text.
        parameters: alignment of the buffers behind 64-bit parameters, by position among these; a
            buffer that is not named starts an allocation.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    shared = {m[2]: int(m[1] or 1) for m in _SHARED.finditer(text)}
    found: list[Access] = []
    for entry in _ENTRY.finditer(text):
        names = re.findall(
            r"\.param\s+\.u64\s+(?:\.ptr\s+\S+\s+(?:\.align\s+\d+\s+)?)?(\w+)", entry[2]
        )
        given = parameters or {}
        symbols = shared | {n: given.get(i, ALLOCATION) for i, n in enumerate(names)}
        body = _body(text, entry.end())
        statements: list[tuple[str, list[str]]] = []
        conditional: list[bool] = []
        for piece in re.split(r"[;{}]\s*\n|;", re.sub(r"(?m)^\s*\$?\w+:\s*$", "label x;", body)):
            match = _STATEMENT.fullmatch(piece.strip())
            if match and not match[2].startswith("."):
                statements.append((match[2], _split(match[3])))
                conditional.append(match[1] is not None)
        statements = _one_name_a_value(statements, conditional)
        known = Alignment(statements, symbols)
        for opcode, operands in statements:
            vector = _ACCESS.match(opcode)
            if vector:
                address = next(o for o in operands if o.startswith("["))
                size = int(vector[2]) * int(vector[3]) // 8
                statement = f"{opcode} {', '.join(operands)}"
                found.append(Access(entry[1], statement, size, known.address(address)))
    return found


def _body(text: str, start: int) -> str:
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return text[start:]


def main(argv: Sequence[str] | None = None) -> int:
    """Check files; exit code 1 when an access is not provably aligned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    checked = bad = 0
    for file in parser.parse_args(argv).files:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as e:
            print(f"ptx_alignment: {file}: not a readable PTX file ({e})", file=sys.stderr)
            return 2
        for access in accesses(text):
            checked += 1
            if not access.aligned:
                bad += 1
                print(
                    f"{file}: {access.kernel}: {access.statement}: multiple of {access.alignment}"
                )
    print(f"{checked} vector accesses, {bad} of them not provably aligned")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
