"""The statements of a kernel: directives, labels, instructions; calls are inlined."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .reader import Token, TokenReader, signature_sizes
from .syntax import (
    Addr,
    DestinationPair,
    Imm,
    Instr,
    Kernel,
    NegatedPredicate,
    Operand,
    Reg,
    SpecialRegister,
    SymbolAddress,
    Vec,
    parse_literal,
    type_bits,
)

_HEADERS = re.compile(r"/(targets/[^/]+|(cuda[^/]*|cu\d+)(/bin/\.\.)?)/include/")
"""The folders of a toolkit's headers, and of NVIDIA's wheels."""
_SYSTEM = {
    "vprintf": (32, 64, 64), "__assertfail": (64, 64, 32, 64, 64),
    "malloc": (64, 64), "free": (64,),
}  # fmt: skip
"""Functions that the driver provides: bits of their results and parameters."""


class KernelBodyParser:
    """The statements of one kernel."""

    def __init__(self, parser: TokenReader, kernel: Kernel) -> None:
        self.p, self.kernel = parser, kernel
        self.scopes: list[dict[str, Reg]] = []
        self.labels: dict[str, int] = {}
        self.source: tuple[str, int] | None = None
        self.callers: dict[tuple[str, str, str], tuple[str, str, str]] = {}
        self.params: list[dict[str, str]] = []
        self.renamed: dict[str, str] = {}
        self.end = ""
        self.unique = self.addressed = 0
        self.prototypes: dict[str, list[str]] = {}
        self.inside: list[str] = []

    def source_location(self, words: list[str]) -> tuple[str, int]:
        """File and line of a `.loc`: of code of CUDA's own headers, where it was called."""
        place = words[0], words[1], words[2] if len(words) > 2 else "0"
        if "inlined_at" in words:
            at = words.index("inlined_at") + 1
            self.callers[place] = words[at], words[at + 1], words[at + 2]
        seen = {place}
        while _HEADERS.search(self.p.files.get(int(place[0]), "")):
            caller = self.callers.get(place)
            if caller is None or caller in seen:
                break
            place = caller
            seen.add(place)
        return self.p.files.get(int(place[0]), ""), int(place[1])

    def parse_scope(self) -> None:
        """Statements up to the closing brace."""
        self.scopes.append({})
        self.params.append({})
        while not self.p.take_if("}"):
            self.parse_statement()
        self.scopes.pop()
        self.params.pop()

    def parse_statement(self) -> None:
        """One statement or directive."""
        p = self.p
        tok = p.next()
        if tok.kind == "end":
            raise p.make_error("kernel without end", tok)
        if tok.text == "{":
            self.parse_scope()
        elif tok.text == ";":
            pass
        elif tok.text == ".reg":
            kind = p.next().text[1:]
            if kind in ("v2", "v4"):
                raise p.make_error("vector registers are not supported", tok)
            p.at -= 1
            for variable in p.take_variables("reg"):
                reg = Reg(len(self.kernel.regs), type_bits(kind), variable.name)
                self.kernel.regs.append(reg)
                self.scopes[-1][variable.name] = reg
            p.expect(";")
        elif tok.text == ".param":  # of a call to come
            for variable in p.take_variables("param"):
                self.unique += 1
                self.params[-1][variable.name] = f"{variable.name}@{self.unique}"
            p.expect(";")
        elif tok.text in (".local", ".shared", ".const", ".global"):
            for variable in p.take_variables(tok.text[1:]):
                self.kernel.variables[variable.name] = variable
            p.expect(";")
        elif tok.text == ".loc":
            self.source = self.source_location([t.text for t in p.take_rest_of_line()])
        elif tok.text == ".pragma":
            p.skip_to(";")
        elif tok.kind == "id" and p.peek().text == ":":
            p.at += 1
            if p.peek().text == ".branchtargets":
                p.at += 1
                self.kernel.tables[tok.text] = list(self._take_names_until(";"))
            elif p.take_if(".callprototype"):
                self.prototypes[tok.text] = self.functions_fitting_prototype()
            elif p.take_if(".calltargets"):
                self.prototypes[tok.text] = [
                    n for n in self._take_names_until(";") if n in p.functions
                ]
            else:
                name = self.renamed.get(tok.text, tok.text)
                self.labels[name] = len(self.kernel.instrs)
        else:
            self.parse_instruction(tok)

    def functions_fitting_prototype(self) -> list[str]:
        """The functions that fit `(results) _ (parameters)`, of those that have an address."""
        p = self.p
        _, *lists = p.take_signature()
        p.skip_to(";")
        want = signature_sizes(*lists)
        return [n for n, f in p.functions.items() if n in p.taken and f.shape == want]

    def _take_names_until(self, end: str) -> Iterator[str]:
        while (tok := self.p.next()).text != end:
            if tok.text != ",":
                yield tok.text

    def parse_instruction(self, tok: Token) -> None:
        """One instruction, guard included."""
        p, guard, negated, first = self.p, None, False, tok
        if tok.text == "@":
            negated = p.take_if("!")
            guard = self.require_register(p.next())
            tok = p.next()
        if tok.kind != "id" or tok.text.startswith("."):
            raise p.make_error(f"expected an instruction, found {tok.text!r}", tok)
        op, *mods = tok.text.split(".")
        if op == "call":
            self.parse_call(guard, negated, first)
            return
        args: list[Operand | None] = []
        while not p.take_if(";"):
            args.append(self.parse_operand())
            if p.take_if("|"):
                args[-1] = DestinationPair(args[-1], self.parse_operand())
            if p.peek().text != ";":
                p.expect(",")
        end = p.toks[p.at - 1].line
        text = " ".join(" ".join(p.lines[first.line - 1 : end]).split())
        if op == "ret" and self.end:
            op, mods, args = "bra", [], [SymbolAddress(self.end)]
        self.kernel.instrs.append(
            Instr(op, tuple(mods), tuple(args), guard, negated, first.line, text, self.source)
        )

    def parse_call(self, guard: Reg | None, negated: bool, first: Token) -> None:
        """A call: of a function with a body, of one by its address, of the system's."""
        p = self.p
        results = self.parse_parameter_names() if p.peek().text == "(" else []
        p.take_if(",")
        tok = p.next()
        given = self.parse_parameter_names() if p.take_if(",") and p.peek().text == "(" else []
        fits: list[str] | None = None
        while not p.take_if(";"):  # prototype or targets of an indirect call
            word = p.next()
            if word.kind == "end":
                raise p.make_error("call without end", tok)
            fits = self.prototypes.get(word.text, fits)
        target = self.find_register(tok.text)
        self.unique += 1
        end = f"end@{self.unique}"
        if guard is not None:
            self.add_call_instruction("bra", (), (SymbolAddress(end),), first, guard, not negated)
        if target is not None:
            if fits is None:
                raise p.make_error("a call by address without its prototype", tok)
            self.inline_indirect_call(target, fits, results, given, end, first)
        elif tok.text in p.functions:
            self.inline_function(tok.text, results, given, tok)
        elif tok.text in _SYSTEM:
            names, sizes = (*results, *given), _SYSTEM[tok.text]
            if len(names) != len(sizes):
                raise p.make_error(f"{tok.text} has {len(sizes)} results and parameters", tok)
            self.add_call_instruction(tok.text, (), tuple(map(SymbolAddress, names)), first)
            for name, bits in zip(names, sizes, strict=True):
                self.kernel.call_parameter_register(name, 0, bits)
        else:
            raise p.make_error(f"call of {tok.text}, which has no body here", tok)
        self.labels[end] = len(self.kernel.instrs)

    def add_call_instruction(
        self, op: str, mods: tuple[str, ...], args: tuple[Operand | None, ...], first: Token,
        guard: Reg | None = None, negated: bool = False,
    ) -> None:  # fmt: skip
        """An instruction that stands for a call, with the call's text."""
        text = " ".join(self.p.lines[first.line - 1].split())
        self.kernel.instrs.append(
            Instr(op, mods, args, guard, negated, first.line, text, self.source)
        )

    def inline_indirect_call(
        self, target: Reg, fits: list[str], results: list[str], given: list[str], end: str,
        first: Token,
    ) -> None:  # fmt: skip
        """A call by address: every function that fits, where the address is its own.

        One that calls itself refuses a launch that gets that far, and no other.
        """
        for name in fits:
            self.unique += 1
            skip = f"skip@{self.unique}"
            test = Reg(len(self.kernel.regs), 1, f"is@{self.unique}")
            self.kernel.regs.append(test)
            self.add_call_instruction(
                "setp", ("ne", "u64"), (test, target, SymbolAddress(name)), first
            )
            self.add_call_instruction("bra", (), (SymbolAddress(skip),), first, test)
            self.addressed += 1
            self.inline_function(name, results, given, first)
            self.addressed -= 1
            self.add_call_instruction("bra", (), (SymbolAddress(end),), first)
            self.labels[skip] = len(self.kernel.instrs)
        self.add_call_instruction("trap", (), (), first)

    def inline_function(self, name: str, results: list[str], given: list[str], tok: Token) -> None:
        """Put the function's body here: registers, labels and parameters under names of its own."""
        p = self.p
        function = p.functions[name]
        if name in self.inside and self.addressed:
            self.add_call_instruction(
                "__recursion", (), (), tok
            )  # which a launch may never come to
            return
        if name in self.inside or len(self.inside) >= 16:
            raise p.make_error("calls nest too deep (recursion?)", tok)
        self.unique += 1
        end = f"end@{self.unique}"
        formal = [
            *zip(function.results, results, strict=True),
            *zip(function.params, given, strict=True),
        ]
        kept = (self.scopes, self.params, self.renamed, self.end, p.at)
        self.scopes, self.params = [], [dict(formal)]
        p.at, self.end = function.at, end
        self.inside.append(name)
        self.renamed = {name: f"{name}@{self.unique}" for name in self.labels_of_body()}
        self.parse_scope()
        self.scopes, self.params, self.renamed, self.end, p.at = kept
        self.inside.pop()
        self.labels[end] = len(self.kernel.instrs)

    def labels_of_body(self) -> list[str]:
        """Labels between here and the brace that closes the function."""
        found, level, toks = [], 1, self.p.toks
        at = self.p.at
        while level:
            level += {"{": 1, "}": -1}.get(toks[at].text, 0)
            if toks[at].kind == "id" and toks[at + 1].text == ":":
                found.append(toks[at].text)
            at += 1
        return found

    def parse_parameter_names(self) -> list[str]:
        """(a, b, ...) of a call: the unique names of parameter variables."""
        self.p.expect("(")
        return [self.unique_parameter_name(name) for name in self._take_names_until(")")]

    def unique_parameter_name(self, name: str) -> str:
        """The unique name of a call's parameter variable; other names stay."""
        for scope in reversed(self.params):
            if name in scope:
                return scope[name]
        return self.renamed.get(name, name)

    def require_register(self, tok: Token) -> Reg:
        """A declared register."""
        reg = self.find_register(tok.text)
        if reg is None:
            raise self.p.make_error(f"undeclared register {tok.text!r}", tok)
        return reg

    def find_register(self, name: str) -> Reg | None:
        """The innermost register of that name."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def parse_operand(self) -> Operand | None:
        """One operand; None for the sink."""
        p = self.p
        tok = p.next()
        if tok.text == "{":
            items = []
            while not p.take_if("}"):
                items.append(self.parse_operand())
                p.take_if(",")
            return Vec(tuple(items))
        if tok.text == "[":
            return self.parse_address()
        if tok.text == "!":
            return NegatedPredicate(self.require_register(p.next()))
        if tok.text == "-":
            literal = parse_literal(p.next().text)
            return Imm(-literal.value, literal.kind)
        if tok.kind == "num":
            return parse_literal(tok.text)
        if tok.text == "_":
            return None
        reg = self.find_register(tok.text)
        if reg is not None:
            return reg
        if tok.text.startswith("%"):
            return SpecialRegister(tok.text)
        if tok.text == "WARP_SZ":
            return Imm(32, "int")
        if tok.kind != "id":
            raise p.make_error(f"unexpected {tok.text!r}", tok)
        if p.take_if("["):  # tinygrad writes local0[0]
            offset = p.take_integer()
            p.expect("]")
        else:
            offset = p.take_displacement()
        return SymbolAddress(self.unique_parameter_name(tok.text), offset)

    def parse_address(self) -> Addr:
        """The rest of [base + offset]."""
        base = self.parse_operand()
        if isinstance(base, SymbolAddress):
            base, offset = SymbolAddress(base.name), base.offset
        elif isinstance(base, (Imm, Reg)):
            offset = self.p.take_displacement()
        else:
            raise self.p.make_error("this is no address", self.p.peek())
        self.p.expect("]")
        return Addr(base, offset)
