"""PTX text to modules, kernels and instructions (PTX ISA 8.5, "Syntax" and "Directives").

Registers are numbered per kernel; scopes (`{ ... }`, as inline assembly makes them) may shadow
names. Everything that is not understood raises `PtxError` with the line and the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .body import Body
from .tree import (
    Kernel,
    Module,
    PtxError,
    Variable,
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
class Token:
    """A token: kind (nl, str, num, id, sym), text, line."""

    kind: str
    text: str
    line: int


def _tokens(text: str) -> list[Token]:
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n") or " ", text)
    out, pos, line = [], 0, 1
    while pos < len(text):
        if text[pos] == "\0":  # a C string's end: NVRTC and nvJitLink give one
            break
        match = _TOKEN.match(text, pos)
        if match is None:
            out.append(Token("bad", text[pos : pos + 40].split("\n")[0], line))
            pos += 1
            continue
        pos = match.end()
        kind = match.lastgroup or ""
        if kind == "nl":
            out.append(Token("nl", "\n", line))
            line += 1
        elif kind != "ws":
            out.append(Token(kind, match.group(), line))
    return out


@dataclass(frozen=True)
class Function:
    """A .func: names of results and parameters, index of its body's first token."""

    results: list[str]
    params: list[str]
    at: int


class Parser:
    """A module's text; `run` gives its tree."""

    def __init__(self, text: str) -> None:
        self.toks = _tokens(text)
        self.lines = text.split("\n")
        self.at = 0
        self.module = Module()
        self.files: dict[int, str] = {}
        self.functions: dict[str, Function] = {}

    # tokens
    def _skip_lines(self) -> None:
        while self.at < len(self.toks) and self.toks[self.at].kind == "nl":
            self.at += 1

    def peek(self) -> Token:
        """The next token that is no line end."""
        self._skip_lines()
        return self.toks[self.at] if self.at < len(self.toks) else Token("end", "", len(self.lines))

    def next(self) -> Token:
        """Take the next token."""
        tok = self.peek()
        self.at += 1
        if tok.kind == "bad":
            raise PtxError(f"PTX line {tok.line}: cannot read {tok.text!r}")
        return tok

    def take(self, text: str) -> bool:
        """Take the next token if it is `text`."""
        if self.peek().text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Take `text` or fail."""
        tok = self.next()
        if tok.text != text:
            raise self.error(f"expected {text!r}, found {tok.text!r}", tok)

    def error(self, what: str, tok: Token) -> PtxError:
        """An error at a token."""
        text = self.lines[tok.line - 1].strip() if tok.line <= len(self.lines) else ""
        return PtxError(f"PTX line {tok.line}: {what} in {text!r}")

    def rest_of_line(self) -> list[Token]:
        """Tokens up to the line's end (directives without semicolon)."""
        out = []
        while self.at < len(self.toks) and self.toks[self.at].kind != "nl":
            out.append(self.toks[self.at])
            self.at += 1
        return out

    def integer(self) -> int:
        """Take a number."""
        negative = self.take("-")
        tok = self.next()
        if tok.kind != "num":
            raise self.error(f"expected a number, found {tok.text!r}", tok)
        value = int(number(tok.text).value)
        return -value if negative else value

    # module scope
    def run(self) -> Module:
        """Parse the whole text."""
        for at, tok in enumerate(self.toks):
            if tok.text == ".func":
                self.at = at + 1
                self.function()
            elif tok.text == ".file":
                number, name = self.toks[at + 1].text, self.toks[at + 2].text
                self.files[int(number)] = name.strip('"')
        self.at = 0
        while (tok := self.peek()).kind != "end":
            if tok.text in (".version", ".target", ".address_size", ".file"):
                self.at += 1
                words = [t.text for t in self.rest_of_line()]
                if tok.text == ".version":
                    self.module.version = words[0]
                elif tok.text == ".target":
                    self.module.target = words[0]
                elif tok.text == ".address_size" and words[:1] != ["64"]:
                    raise self.error("only 64-bit addresses exist on this GPU", tok)
            elif tok.text in (".visible", ".extern", ".weak", ".common"):
                self.at += 1
            elif tok.text == ".entry":
                self.at += 1
                self.entry()
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
            elif tok.kind == "bad":
                self.next()
            else:
                raise self.error(f"unknown directive {tok.text!r}", tok)
        return self.module

    def skip_block(self) -> None:
        """Skip to the brace that closes the open one."""
        depth = 1
        while depth:
            tok = self.peek()
            self.at += 1
            if tok.kind == "end":
                raise self.error("block without end", tok)
            depth += {"{": 1, "}": -1}.get(tok.text, 0)

    def skip_function(self) -> None:
        """Step over a function; calls take it from `functions`."""
        while (tok := self.next()).text not in ("{", ";"):
            if tok.kind == "end":
                raise self.error("function without body", tok)
        if tok.text == "{":
            self.skip_block()

    def function(self) -> None:
        """Note where a function's body begins and what its parameters are called."""
        names: list[list[str]] = [[], []]
        if self.peek().text == "(":
            names[0] = self.parameters()
        name = self.next().text
        if self.peek().text == "(":
            names[1] = self.parameters()
        while (tok := self.next()).text not in ("{", ";"):
            if tok.kind == "end":
                raise self.error("function without body", tok)
        if tok.text == "{":
            self.functions[name] = Function(names[0], names[1], self.at)
            if name not in self.module.functions:
                self.module.functions.append(name)

    def parameters(self) -> list[str]:
        """Names of a function's (.param ...) list."""
        self.expect("(")
        names = []
        while not self.take(")"):
            tok = self.next()
            if tok.text not in (".param", ".reg"):
                raise self.error("expected .param", tok)
            names += [v.name for v in self.variable("param", many=False)]
            self.take(",")
        return names

    def variable(self, space: str, many: bool = True) -> list[Variable]:
        """Variables of one declaration, without the semicolon."""
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
        """Parse an initialiser into the variable."""
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
    def entry(self) -> None:
        """A kernel; one that cannot be read refuses itself when it is to run, not its module."""
        start, name = self.at, self.peek().text
        try:
            self.kernel()
        except PtxError as e:
            self.at = start
            while (tok := self.peek()).text != "{":
                if tok.kind == "end":
                    raise
                self.at += 1
            self.at += 1
            try:
                self.skip_block()
            except PtxError:
                raise e from None
            self.module.kernels[name] = Kernel(name, refusal=f"{e} (kernel {name})")

    def kernel(self) -> None:
        """Parse an entry."""
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
        body = Body(self, kernel)
        body.scope()
        kernel.labels = body.labels
        self.module.kernels[kernel.name] = kernel


def parse(text: str) -> Module:
    """Parse a PTX module. Raises PtxError with line and text."""
    return Parser(text).run()
