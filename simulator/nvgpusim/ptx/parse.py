"""PTX text to modules, kernels and instructions (PTX ISA 8.5, "Syntax" and "Directives").

Registers are numbered per kernel; scopes (`{ ... }`, as inline assembly makes them) may shadow
names. Everything that is not understood raises `PtxError` with the line and the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .tree import (
    Addr,
    Imm,
    Instr,
    Kernel,
    Module,
    Neg,
    Operand,
    Pair,
    PtxError,
    Reg,
    Special,
    Sym,
    Variable,
    Vec,
    number,
    type_bits,
)

_TOKEN = re.compile(
    r"""(?P<nl>\n)|(?P<ws>[ \t\r]+)|(?P<str>"(?:[^"\\]|\\.)*")
  |(?P<num>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
     |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  |(?P<id>\.?[A-Za-z_%$][\w$%]*(?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*)
  |(?P<sym>::|[{}\[\](),;:|!@<>+\-=])""",
    re.X,
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


@dataclass(frozen=True)
class _Tok:
    kind: str
    text: str
    line: int


def _tokens(text: str) -> list[_Tok]:
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n") or " ", text)
    out, pos, line = [], 0, 1
    while pos < len(text):
        if text[pos] == "\0":  # a C string's end: NVRTC and nvJitLink give one
            break
        match = _TOKEN.match(text, pos)
        if match is None:
            rest = text[pos : pos + 40].split("\n")[0]
            raise PtxError(f"PTX line {line}: cannot read {rest!r}")
        pos = match.end()
        kind = match.lastgroup or ""
        if kind == "nl":
            out.append(_Tok("nl", "\n", line))
            line += 1
        elif kind != "ws":
            out.append(_Tok(kind, match.group(), line))
    return out


class _Parser:
    def __init__(self, text: str) -> None:
        self.toks = _tokens(text)
        self.lines = text.split("\n")
        self.at = 0
        self.module = Module()
        self.files: dict[int, str] = {}

    # tokens
    def _skip_lines(self) -> None:
        while self.at < len(self.toks) and self.toks[self.at].kind == "nl":
            self.at += 1

    def peek(self) -> _Tok:
        self._skip_lines()
        return self.toks[self.at] if self.at < len(self.toks) else _Tok("end", "", len(self.lines))

    def next(self) -> _Tok:
        tok = self.peek()
        self.at += 1
        return tok

    def take(self, text: str) -> bool:
        if self.peek().text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        tok = self.next()
        if tok.text != text:
            raise self.error(f"expected {text!r}, found {tok.text!r}", tok)

    def error(self, what: str, tok: _Tok) -> PtxError:
        text = self.lines[tok.line - 1].strip() if tok.line <= len(self.lines) else ""
        return PtxError(f"PTX line {tok.line}: {what} in {text!r}")

    def rest_of_line(self) -> list[_Tok]:
        out = []
        while self.at < len(self.toks) and self.toks[self.at].kind != "nl":
            out.append(self.toks[self.at])
            self.at += 1
        return out

    def integer(self) -> int:
        negative = self.take("-")
        tok = self.next()
        if tok.kind != "num":
            raise self.error(f"expected a number, found {tok.text!r}", tok)
        value = int(number(tok.text).value)
        return -value if negative else value

    # module scope
    def run(self) -> Module:
        while (tok := self.peek()).kind != "end":
            if tok.text in (".version", ".target", ".address_size", ".file"):
                self.at += 1
                words = [t.text for t in self.rest_of_line()]
                if tok.text == ".version":
                    self.module.version = words[0]
                elif tok.text == ".target":
                    self.module.target = words[0]
                elif tok.text == ".file":
                    self.files[int(words[0])] = words[1].strip('"')
                elif tok.text == ".address_size" and words[:1] != ["64"]:
                    raise self.error("only 64-bit addresses exist on this GPU", tok)
            elif tok.text in (".visible", ".extern", ".weak", ".common"):
                self.at += 1
            elif tok.text == ".entry":
                self.at += 1
                self.kernel()
            elif tok.text == ".func":
                self.skip_function()
            elif tok.text in (".global", ".const", ".shared"):
                self.at += 1
                for variable in self.variable(tok.text[1:]):
                    self.module.variables[variable.name] = variable
                self.expect(";")
            elif tok.text == ".section":
                while self.next().text != "{":
                    pass
                self.skip_block()
            elif tok.text == ".pragma":
                while self.next().text != ";":
                    pass
            else:
                raise self.error(f"unknown directive {tok.text!r}", tok)
        return self.module

    def skip_block(self) -> None:
        depth = 1
        while depth:
            tok = self.next()
            if tok.kind == "end":
                raise self.error("block without end", tok)
            depth += {"{": 1, "}": -1}.get(tok.text, 0)

    def skip_function(self) -> None:
        # A call to it is refused where it stands; a declaration alone does no harm.
        while (tok := self.next()).text not in ("{", ";"):
            if tok.kind == "end":
                raise self.error("function without body", tok)
        if tok.text == "{":
            self.skip_block()

    def variable(self, space: str, many: bool = True) -> list[Variable]:
        align, bits, count = 0, 0, 1
        while (tok := self.peek()).text.startswith("."):
            self.at += 1
            if tok.text == ".align":
                align = self.integer()
            elif tok.text in (".v2", ".v4"):
                count = int(tok.text[2:])
            elif tok.text in (".ptr", ".global", ".const", ".shared", ".local"):
                pass  # attributes of a pointer parameter
            elif tok.text in (".attribute",):
                raise self.error("unsupported attribute", tok)
            else:
                bits = type_bits(tok.text[1:])
        out = []
        while True:
            tok = self.next()
            if tok.kind != "id":
                raise self.error(f"expected a name, found {tok.text!r}", tok)
            names = [tok.text]
            if self.take("<"):
                names = [f"{tok.text}{i}" for i in range(self.integer())]
                self.expect(">")
            size = max(1, bits // 8) * count
            while self.take("["):
                size *= 0 if self.peek().text == "]" else self.integer()
                self.expect("]")
            for name in names:
                out.append(Variable(name, space, size, align or max(1, bits // 8) * count))
            if self.take("="):
                self.initial(out[-1], max(1, bits // 8))
            if not many or not self.take(","):
                return out

    def initial(self, variable: Variable, width: int) -> None:
        data = bytearray()

        def item() -> None:
            if self.take("{"):
                while not self.take("}"):
                    item()
                    self.take(",")
                return
            tok = self.peek()
            if tok.kind == "id":
                self.at += 1
                name = tok.text
                if name == "generic":
                    self.expect("(")
                    name = self.next().text
                    self.expect(")")
                variable.references.append((len(data), name))
                data.extend(bytes(width))
                return
            negative = self.take("-")
            literal = number(self.next().text)
            value = int(literal.value)
            data.extend(
                ((-value if negative else value) & (1 << 8 * width) - 1).to_bytes(width, "little")
            )

        item()
        if len(data) > variable.size and variable.size:
            raise PtxError(f"initialiser of {variable.name} is longer than the variable")
        variable.data = bytes(data).ljust(variable.size, b"\0")

    # kernel scope
    def kernel(self) -> None:
        kernel = Kernel(self.next().text)
        if self.take("("):
            while not self.take(")"):
                self.expect(".param")
                # A parameter is laid out at its natural alignment, in order.
                for variable in self.variable("param", many=False):
                    at = -(-kernel.param_bytes // variable.align) * variable.align
                    variable.offset, kernel.param_bytes = at, at + variable.size
                    kernel.params[variable.name] = variable
                self.take(",")
        while not self.take("{"):
            tok = self.next()
            if tok.text in (".maxntid", ".reqntid"):
                kernel.max_threads = 1
                for _ in range(3):
                    kernel.max_threads *= self.integer()
                    if not self.take(","):
                        break
            elif tok.text in (".minnctapersm", ".maxnreg", ".maxnctapersm"):
                self.integer()
            elif tok.text == ".noreturn":
                pass
            else:
                raise self.error(f"unknown performance directive {tok.text!r}", tok)
        body = _Body(self, kernel)
        body.scope()
        kernel.labels = body.labels
        self.module.kernels[kernel.name] = kernel


class _Body:
    """The statements of one kernel."""

    def __init__(self, parser: _Parser, kernel: Kernel) -> None:
        self.p, self.kernel = parser, kernel
        self.scopes: list[dict[str, Reg]] = []
        self.labels: dict[str, int] = {}
        self.source: tuple[str, int] | None = None

    def scope(self) -> None:
        self.scopes.append({})
        while not self.p.take("}"):
            self.statement()
        self.scopes.pop()

    def statement(self) -> None:
        p = self.p
        tok = p.next()
        if tok.kind == "end":
            raise p.error("kernel without end", tok)
        if tok.text == "{":
            self.scope()
        elif tok.text == ";":
            pass
        elif tok.text == ".reg":
            kind = p.next().text[1:]
            if kind in ("v2", "v4"):
                raise p.error("vector registers are not supported", tok)
            p.at -= 1
            for variable in p.variable("reg"):
                reg = Reg(len(self.kernel.regs), type_bits(kind), variable.name)
                self.kernel.regs.append(reg)
                self.scopes[-1][variable.name] = reg
            p.expect(";")
        elif tok.text in (".local", ".shared", ".const", ".global", ".param"):
            for variable in p.variable(tok.text[1:]):
                self.kernel.variables[variable.name] = variable
            p.expect(";")
        elif tok.text == ".loc":
            words = [t.text for t in p.rest_of_line()]
            self.source = (p.files.get(int(words[0]), ""), int(words[1]))
        elif tok.text == ".pragma":
            while p.next().text != ";":
                pass
        elif tok.kind == "id" and p.peek().text == ":":
            p.at += 1
            if p.peek().text == ".branchtargets":
                p.at += 1
                self.kernel.tables[tok.text] = list(self._names(";"))
            else:
                self.labels[tok.text] = len(self.kernel.instrs)
        else:
            self.instruction(tok)

    def _names(self, end: str) -> Iterator[str]:
        while (tok := self.p.next()).text != end:
            if tok.text != ",":
                yield tok.text

    def instruction(self, tok: _Tok) -> None:
        p, guard, negated, first = self.p, None, False, tok
        if tok.text == "@":
            negated = p.take("!")
            guard = self.register(p.next())
            tok = p.next()
        if tok.kind != "id" or tok.text.startswith("."):
            raise p.error(f"expected an instruction, found {tok.text!r}", tok)
        op, *mods = tok.text.split(".")
        args: list[Operand | None] = []
        while not p.take(";"):
            args.append(self.operand())
            if p.take("|"):
                args[-1] = Pair(args[-1], self.operand())
            if p.peek().text != ";":
                p.expect(",")
        end = p.toks[p.at - 1].line
        text = " ".join(" ".join(p.lines[first.line - 1 : end]).split())
        self.kernel.instrs.append(
            Instr(op, tuple(mods), tuple(args), guard, negated, first.line, text, self.source)
        )

    def register(self, tok: _Tok) -> Reg:
        reg = self.lookup(tok.text)
        if reg is None:
            raise self.p.error(f"undeclared register {tok.text!r}", tok)
        return reg

    def lookup(self, name: str) -> Reg | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def operand(self) -> Operand | None:
        p = self.p
        tok = p.next()
        if tok.text == "{":
            items = []
            while not p.take("}"):
                items.append(self.operand())
                p.take(",")
            return Vec(tuple(items))
        if tok.text == "[":
            return self.address()
        if tok.text == "!":
            return Neg(self.register(p.next()))
        if tok.text == "-":
            literal = number(p.next().text)
            return Imm(-literal.value, literal.kind)
        if tok.kind == "num":
            return number(tok.text)
        if tok.text == "_":
            return None
        reg = self.lookup(tok.text)
        if reg is not None:
            return reg
        if tok.text.startswith("%"):
            return Special(tok.text)
        if tok.text == "WARP_SZ":
            return Imm(32, "int")
        if tok.kind != "id":
            raise p.error(f"unexpected {tok.text!r}", tok)
        offset = 0
        if p.take("["):  # tinygrad writes local0[0]
            offset = p.integer()
            p.expect("]")
        elif p.peek().text in "+-":
            sign = 1 if p.next().text == "+" else -1
            offset = sign * p.integer()
        return Sym(tok.text, offset)

    def address(self) -> Addr:
        base = self.operand()
        if isinstance(base, Sym):
            base, offset = Sym(base.name), base.offset
        elif isinstance(base, (Imm, Reg)):
            offset = 0
            if self.p.peek().text in ("+", "-"):
                sign = 1 if self.p.next().text == "+" else -1
                offset = sign * self.p.integer()
        else:
            raise self.p.error("this is no address", self.p.peek())
        self.p.expect("]")
        return Addr(base, offset)


def parse(text: str) -> Module:
    """Parse a PTX module. Raises PtxError with line and text."""
    return _Parser(text).run()
