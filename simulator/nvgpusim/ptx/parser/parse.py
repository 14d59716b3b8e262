"""PTX text to modules, kernels and instructions (PTX ISA 8.5, "Syntax" and "Directives").

Registers are numbered per kernel; scopes (`{ ... }`, as inline assembly makes them) may shadow
names.
"""

from __future__ import annotations

from dataclasses import replace

from .body import KernelBodyParser
from .constant_propagation import replace_registers_by_literals
from .kernel_facts import loads_compared_by_cas
from .reader import FunctionDeclaration, TokenReader, signature_sizes
from .syntax import Kernel, PtxError, PtxModule

_LINKAGE = (".visible", ".extern", ".weak", ".common")


class ModuleParser(TokenReader):
    """A module's text; `parse_module` gives its tree."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.module = PtxModule()

    # module scope
    def parse_module(self) -> PtxModule:
        """Parse the whole text."""
        try:
            return self.parse_directives()
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as e:
            tok = self.toks[min(self.at, len(self.toks) - 1)] if self.toks else self.peek()
            raise self.make_error(f"not understood ({e})", tok) from e

    def parse_directives(self) -> PtxModule:
        """The module's directives, one after the other."""
        for at, tok in enumerate(self.toks):
            if tok.text == ".func":
                self.at = at + 1
                self.record_function_declaration()
            elif tok.text == ".file":
                number, name = self.toks[at + 1].text, self.toks[at + 2].text
                self.files[int(number)] = name.strip('"')
        self.record_addressed_functions()
        self.at = 0
        while (tok := self.peek()).kind != "end":
            if tok.text in (".version", ".target", ".address_size", ".file"):
                self.at += 1
                words = [t.text for t in self.take_rest_of_line()]
                if tok.text == ".version":
                    self.module.version = words[0]
                elif tok.text == ".target":
                    self.module.target = words[0]
                elif tok.text == ".address_size" and words[:1] != ["64"]:
                    raise self.make_error("only 64-bit addresses exist on this GPU", tok)
            elif tok.text in _LINKAGE:
                self.at += 1
            elif tok.text == ".entry":
                self.at += 1
                self.parse_or_refuse_kernel()
            elif tok.text == ".func":
                self.skip_function()
            elif tok.text in (".global", ".const", ".shared"):
                self.at += 1
                for variable in self.take_variables(tok.text[1:]):
                    self.module.variables[variable.name] = variable
                self.expect(";")
            elif tok.text == ".section":
                self.skip_to("{")
                self.skip_block()
            elif tok.text == ".pragma":
                self.skip_to(";")
            elif tok.kind == "bad":
                self.next()
            else:
                raise self.make_error(f"unknown directive {tok.text!r}", tok)
        return self.module

    def skip_block(self) -> None:
        """Skip to the brace that closes the open one."""
        depth = 1
        while depth:
            tok = self.peek()
            self.at += 1
            if tok.kind == "end":
                raise self.make_error("block without end", tok)
            depth += {"{": 1, "}": -1}.get(tok.text, 0)

    def skip_function(self) -> None:
        """Step over a function; calls take it from `functions`."""
        if self.skip_to("{", ";", lacking="function without body").text == "{":
            self.skip_block()

    def record_function_declaration(self) -> None:
        """Note where a function's body begins and what its parameters are called."""
        name, *lists = self.take_signature()
        if self.skip_to("{", ";", lacking="function without body").text == "{":
            results, params = ([v.name for v in some] for some in lists)
            self.functions[name] = FunctionDeclaration(
                results, params, self.at, signature_sizes(*lists)
            )
            if name not in self.module.functions:
                self.module.functions.append(name)

    # kernel scope
    def parse_or_refuse_kernel(self) -> None:
        """A kernel; one that cannot be read refuses itself when it is to run, not its module."""
        start, name = self.at, self.peek().text
        try:
            self.parse_kernel()
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

    def record_addressed_functions(self) -> None:
        """Note the functions whose address somebody takes: a call by address can reach them."""
        head = ""
        for tok in self.toks:
            if tok.text == ";" or (tok.text in ("{", "}") and head != "="):
                head = ""
            elif tok.text == "=":
                head = "="
            elif not head:
                head = "" if tok.text in _LINKAGE or tok.kind != "id" else tok.text
            elif tok.text in self.functions and not head.startswith((".func", "call")):
                self.taken.add(tok.text)

    def parse_kernel(self) -> None:
        """Parse an entry."""
        kernel = Kernel(self.next().text)
        if self.take_if("("):
            while not self.take_if(")"):
                self.expect(".param")
                # A parameter is laid out at its natural alignment, in order.
                for variable in self.take_variables("param", many=False):
                    at = -(-kernel.param_bytes // variable.align) * variable.align
                    variable.offset, kernel.param_bytes = at, at + variable.size
                    kernel.params[variable.name] = variable
                self.take_if(",")
        while not self.take_if("{"):
            tok = self.next()
            if tok.text in (".maxntid", ".reqntid"):
                kernel.max_threads = 1
                for _ in range(3):
                    kernel.max_threads *= self.take_integer()
                    if not self.take_if(","):
                        break
            elif tok.text in (".minnctapersm", ".maxnreg", ".maxnctapersm"):
                self.take_integer()
            elif tok.text == ".noreturn":
                pass
            else:
                raise self.make_error(f"unknown performance directive {tok.text!r}", tok)
        body = KernelBodyParser(self, kernel)
        body.parse_scope()
        kernel.labels = body.labels
        for n in loads_compared_by_cas(kernel):
            instr = kernel.instrs[n]
            kernel.instrs[n] = replace(instr, mods=(*instr.mods, "relaxed"))
        replace_registers_by_literals(kernel)
        self.module.kernels[kernel.name] = kernel


def parse(text: str) -> PtxModule:
    """Parse a PTX module. Raises PtxError with line and text."""
    return ModuleParser(text).parse_module()
