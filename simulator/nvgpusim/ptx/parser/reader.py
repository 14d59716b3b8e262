"""PTX text as tokens, and what modules and kernels both declare: variables.

Everything that is not understood raises `PtxError` with the line and the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .syntax import PtxError, Variable, parse_literal, type_bits

_TOKEN = re.compile(
    r"""(?P<nl>\n)|(?P<ws>[ \t\r]+)|(?P<str>"(?:[^"\\]|\\.)*")
  |(?P<num>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
     |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  |(?P<id>\.[A-Za-z_%$][\w$%]*|[A-Za-z_%$][\w$%]*(?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*)
  |(?P<sym>::|[{}\[\](),;:|!@<>+\-=])""",
    re.X,
)
MOST_NAMES, MOST_BYTES = 1 << 20, 1 << 40
"""Registers of one declaration and bytes of one variable: more is a damaged text."""
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


@dataclass(frozen=True)
class Token:
    """A token: kind (nl, str, num, id, sym), text, line."""

    kind: str
    text: str
    line: int


def _tokenize(text: str) -> list[Token]:
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
class FunctionDeclaration:
    """A .func: names of results and parameters, index of its body's first token.

    `shape`: bytes of the results, and of the parameters.
    """

    results: list[str]
    params: list[str]
    at: int
    shape: tuple[tuple[int, ...], tuple[int, ...]]


def signature_sizes(
    results: list[Variable], params: list[Variable]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of results and of parameters: the same for a call and a function that fits it."""
    return tuple(v.size for v in results), tuple(v.size for v in params)


class TokenReader:
    """A module's text and a place in it; `functions`: those that calls may name.

    `taken`: functions whose address the module uses.
    """

    def __init__(self, text: str) -> None:
        self.toks = _tokenize(text)
        self.lines = text.split("\n")
        self.at = 0
        self.files: dict[int, str] = {}
        self.functions: dict[str, FunctionDeclaration] = {}
        self.taken: set[str] = set()

    # tokens
    def _skip_line_ends(self) -> None:
        while self.at < len(self.toks) and self.toks[self.at].kind == "nl":
            self.at += 1

    def peek(self) -> Token:
        """The next token that is no line end."""
        self._skip_line_ends()
        return self.toks[self.at] if self.at < len(self.toks) else Token("end", "", len(self.lines))

    def next(self) -> Token:
        """Take the next token."""
        tok = self.peek()
        self.at += 1
        if tok.kind == "end" and self.at > len(self.toks) + 1:
            raise self.make_error("the text ends here", tok)
        if tok.kind == "bad":
            raise PtxError(f"PTX line {tok.line}: cannot read {tok.text!r}")
        return tok

    def take_if(self, text: str) -> bool:
        """Take the next token if it is `text`."""
        if self.peek().text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Take `text` or fail."""
        tok = self.next()
        if tok.text != text:
            raise self.make_error(f"expected {text!r}, found {tok.text!r}", tok)

    def skip_to(self, *ends: str, lacking: str = "the text ends here") -> Token:
        """Take all tokens to one of `ends`, which is returned."""
        while (tok := self.next()).text not in ends:
            if tok.kind == "end":
                raise self.make_error(lacking, tok)
        return tok

    def take_displacement(self) -> int:
        """Take `+ n` or `- n`; 0 where there is none."""
        if self.peek().text not in ("+", "-"):
            return 0
        return self.take_integer() if self.next().text == "+" else -self.take_integer()

    def make_error(self, what: str, tok: Token) -> PtxError:
        """An error at a token."""
        text = self.lines[tok.line - 1].strip() if tok.line <= len(self.lines) else ""
        return PtxError(f"PTX line {tok.line}: {what} in {text!r}")

    def take_rest_of_line(self) -> list[Token]:
        """Tokens up to the line's end (directives without semicolon)."""
        out = []
        while self.at < len(self.toks) and self.toks[self.at].kind != "nl":
            out.append(self.toks[self.at])
            self.at += 1
        return out

    def take_integer(self) -> int:
        """Take a number."""
        negative = self.take_if("-")
        tok = self.next()
        if tok.kind != "num":
            raise self.make_error(f"expected a number, found {tok.text!r}", tok)
        value = int(parse_literal(tok.text).value)
        return -value if negative else value

    # declarations
    def take_parameters(self) -> list[Variable]:
        """A function's (.param ...) list."""
        self.expect("(")
        found = []
        while not self.take_if(")"):
            tok = self.next()
            if tok.text not in (".param", ".reg"):
                raise self.make_error("expected .param", tok)
            found += self.take_variables("param", many=False)
            self.take_if(",")
        return found

    def take_signature(self) -> tuple[str, list[Variable], list[Variable]]:
        """A function's name, results and parameters: `(results) name (parameters)`."""
        results = self.take_parameters() if self.peek().text == "(" else []
        name = self.next().text
        return name, results, self.take_parameters() if self.peek().text == "(" else []

    def take_variables(self, space: str, many: bool = True) -> list[Variable]:
        """Variables of one declaration, without the semicolon."""
        align, bits, count = 0, 0, 1
        while (tok := self.peek()).text.startswith("."):
            self.at += 1
            if tok.text == ".align":
                align = self.take_integer()
            elif tok.text in (".v2", ".v4"):
                count = int(tok.text[2:])
            elif tok.text in (".ptr", ".global", ".const", ".shared", ".local"):
                pass  # attributes of a pointer parameter
            elif tok.text in (".attribute",):
                raise self.make_error("unsupported attribute", tok)
            else:
                bits = type_bits(tok.text[1:])
        out = []
        while True:
            tok = self.next()
            if tok.kind != "id":
                raise self.make_error(f"expected a name, found {tok.text!r}", tok)
            names = [tok.text]
            if self.take_if("<"):
                count_of = self.take_integer()
                if not 0 <= count_of <= MOST_NAMES:
                    raise self.make_error(f"0 to {MOST_NAMES} registers were expected", tok)
                names = [f"{tok.text}{i}" for i in range(count_of)]
                self.expect(">")
            size = max(1, bits // 8) * count
            while self.take_if("["):
                size *= 0 if self.peek().text == "]" else self.take_integer()
                self.expect("]")
            if not 0 <= size <= MOST_BYTES:
                raise self.make_error(f"a variable of {size} bytes", tok)
            for name in names:
                out.append(Variable(name, space, size, align or max(1, bits // 8) * count))
            if self.take_if("="):
                self.fill_variable_from_initialiser(out[-1], max(1, bits // 8))
            if not many or not self.take_if(","):
                return out

    def fill_variable_from_initialiser(self, variable: Variable, width: int) -> None:
        """Parse an initialiser into the variable."""
        data = bytearray()

        def item() -> None:
            if self.take_if("{"):
                while not self.take_if("}"):
                    item()
                    self.take_if(",")
                return
            tok = self.peek()
            if tok.kind == "id":
                self.at += 1
                name = tok.text
                if name == "generic":
                    self.expect("(")
                    name = self.next().text
                    self.expect(")")
                variable.references.append((len(data), name, self.take_displacement()))
                data.extend(bytes(width))
                return
            negative = self.take_if("-")
            literal = parse_literal(self.next().text)
            value = int(literal.value)
            data.extend(
                ((-value if negative else value) & (1 << 8 * width) - 1).to_bytes(width, "little")
            )

        item()
        if len(data) > variable.size and variable.size:
            raise PtxError(f"initialiser of {variable.name} is longer than the variable")
        variable.data = bytes(data).ljust(variable.size, b"\0")
