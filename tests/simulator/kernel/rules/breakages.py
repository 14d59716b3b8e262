"""Every rule of the model broken, one place at a time.

A refusal is broken where it is raised: the kernel goes on as if nothing had been wrong. Where it
stands behind `a or b`, or `not a <= x <= b`, each part is left out alone. A rule that forbids
nothing is broken by hand, in BEHAVIOURS.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nvgpusim
from nvgpusim.orin.rules import RULES

ROOT = Path(nvgpusim.__file__).parent
KERNEL = ROOT / "orin" / "kernel"

# rule: (file, text, what takes its place), each found once
BEHAVIOURS: dict[str, list[tuple[str, str, str]]] = {
    "dispatch.copyback": [
        ("orin/kernel/device_file.py", "        residue = self._call_handler(known, record)\n",
         "        try:\n            residue = self._call_handler(known, record)\n"
         "        except KernelError:\n            raw[:] = bytes(len(raw))\n"
         "            self.kernel.user.copy_to_user(arg, bytes(raw))\n            raise\n"),
    ],
    "dispatch.residue": [("orin/kernel/device_file.py", "return int(residue)", "return 0")],
    "fd.cloexec": [
        ("orin/kernel/core.py", "            new = os.dup(fd)\n",
         "            new = os.dup(fd)\n            os.set_inheritable(new, True)\n"),
    ],
    "fd.fork": [
        ("orin/syscall_seam.py", "if token is not None and self.backend.imposes:", "if False:"),
        ("orin/syscall_seam.py", "if seam.backend.imposes:\n                    self.madvise",
         "if False:\n                    self.madvise"),
    ],
    "chars.size": [
        ("orin/kernel/ctrl.py", '["gpu_characteristics_buf_size"] = out.struct.size',
         '["gpu_characteristics_buf_size"] = min(room, out.struct.size)'),
        ("orin/kernel/ctrl.py", 'args["gpu_characteristics_buf_addr"], room, bytes(out.raw)',
         'args["gpu_characteristics_buf_addr"], len(out.raw), bytes(out.raw)'),
    ],
    "as.flags": [
        ("orin/kernel/address_space.py", 'self.note_rule("as.flags")',
         'raise self.refusal("as.range")'),
    ],
    "engine.size": [
        ("orin/kernel/ctrl.py", '["engine_info_buf_size"] = len(data)',
         '["engine_info_buf_size"] = min(room, len(data))'),
    ],
    "space.free-unknown": [
        ("orin/kernel/address_space.py", 'self.note_rule("space.free-unknown")',
         'raise self.refusal("space.taken", errno=22)'),
    ],
    "space.free-unmaps": [
        ("orin/kernel/address_space.py",
         'self.note_rule("space.free-unmaps")\n            mapping.refs -= 1\n',
         'self.note_rule("space.free-unmaps")\n            mapping.refs += 0\n'),
        ("orin/kernel/address_space.py",
         'self.note_rule("space.free-unmaps")\n            mapping.refs -= 1\n',
         'self.note_rule("space.free-unmaps")\n            mapping.refs = 0\n'),
    ],
    "map.again": [
        ("orin/kernel/address_space.py", "old.refs += 1", "old.refs += 0"),
        ("orin/kernel/address_space.py", "old = self._equal_mapping(new, offset)\n",
         "old = None\n"),
    ],
    "map.holds": [
        ("memory.py", 'mapping.buf.add_reference("gpu")', "mapping.buf.drop_reference(str())"),
    ],
    "unmap.unknown": [
        ("orin/kernel/address_space.py", 'self.note_rule("unmap.unknown")',
         'raise self.refusal("map.fixed")'),
    ],
    "unmap.at-once": [
        ("orin/kernel/address_space.py",
         'self.note_rule("unmap.at-once")\n            self.vm.unmap_now(mapping)',
         'self.note_rule("unmap.at-once")'),
    ],
    "subctx.fallback": [
        ("orin/kernel/tsg.py", 'self.kernel.journal.count_rule("subctx.fallback")',
         'raise KernelError("subctx.none-left")'),
    ],
    "subctx.delete-free": [
        ("orin/kernel/tsg.py", 'self.note_rule("subctx.delete-free")',
         'raise self.refusal("subctx.delete")'),
    ],
    "bind.sync": [
        ("orin/kernel/tsg.py", "self.sync, self.spaces[0] = True, channel.vm",
         'raise KernelError("bind.vm")'),
        ("orin/kernel/tsg.py", "self.sync, self.spaces[0] = True, channel.vm",
         "self.spaces[0] = channel.vm"),
    ],
    "unbind.unserviceable": [
        ("orin/kernel/tsg.py", "channel.unserviceable = True", "channel.unserviceable = False"),
        ("orin/kernel/channel.py", "self.unserviceable = True  # until",
         "self.unserviceable = False  # until"),
    ],
    "event.poll": [
        ("orin/kernel/tsg.py", 'self.peer.send(b"!", socket.MSG_OOB)', 'self.peer.send(b"!")'),
        ("orin/kernel/tsg.py", "self.posted = True", "self.posted = False"),
    ],
    "setup.userd-as-is": [
        ("orin/kernel/channel.py", 'self.note_rule("setup.userd-as-is")',
         "userd.memory_view[:] = bytes(len(userd.memory_view))"),
    ],
    "notifier.zeroed": [
        ("orin/kernel/channel.py",
         'found.memory_view[args["offset"] : args["offset"] + NOTIFIER_SIZE] = '
         "bytes(NOTIFIER_SIZE)", "pass"),
    ],
    "notifier.first": [
        ("orin/kernel/channel.py", "offset + 14)[0] != NOTIFIER_SET", "offset + 14)[0] != 1"),
        ("orin/kernel/channel.py", "now >> 32, code, 0, 0", "now >> 32, 0, 0, 0"),
        ("orin/kernel/channel.py", 'buf.memory_view, offset + 14, NOTIFIER_SET)',
         "buf.memory_view, offset + 14, 1)"),
    ],
    "syncpt.same": [("orin/kernel/channel.py", "if self.syncpoint is None:", "if True:")],
    "reset.forced": [
        ("orin/kernel/channel.py", 'FaultReport(NOTIFIER_RESET, "FORCE_RESET',
         'FaultReport(8, "FORCE_RESET'),
        ("orin/kernel/channel.py", "channel.on_tsg_killed(NOTIFIER_RESET)",
         "channel.on_tsg_killed(8)"),
        ("orin/kernel/channel.py", "            self.kernel.kill_tsg_for_fault(self.port, report)\n"
         "        elif", "            pass\n        elif"),
        ("orin/kernel/channel.py", "channel.on_tsg_killed(NOTIFIER_RESET)", "pass"),
    ],
    "timedout.set": [
        ("orin/kernel/channel.py", 'args["value"] = int(self.unserviceable)', 'args["value"] = 0'),
    ],
    "kill.tsg": [
        ("orin/kernel/core.py", "f.tsg.id == port.tsg_id", "f.id == port.id"),
        ("orin/kernel/core.py", "other.alive = False", "pass"),
    ],
    "nvmap-fd.noop": [
        ("orin/kernel/channel.py", 'self.note_rule("nvmap-fd.noop")',
         'raise self.refusal("notifier.mem")'),
    ],
    "create.handle64": [
        ("orin/kernel/nvmap.py", 'args["handle64"] = self._create_owned_handle(args["size64"]).id',
         'args["handle64"] = self._create_owned_handle(args["size64"]).id << 32'),
    ],
    "create.high": [
        ("orin/kernel/nvmap_handles.py", "self._cursor = FIRST_HANDLE", "self._cursor = 1"),
        ("orin/kernel/nvmap_handles.py", "else 1\n", "else 0\n"),
    ],
    "alloc.zeroed": [
        ("orin/kernel/nvmap.py", 'self.note_rule("alloc.zeroed")',
         "handle.buf.array[:1] = 255"),
    ],
    "alloc.tag": [
        ("orin/kernel/nvmap.py", 'self.note_rule("alloc.tag")',
         'raise self.refusal("alloc.align")'),
        ("orin/kernel/nvmap.py", "self._warned = True", "self._warned = False"),
    ],
    "getfd.new": [
        ("orin/kernel/nvmap.py", "            fd = kernel.dup_for_client(source)\n",
         "            fd = self.__dict__.get(f'fd{source}', -1)\n"
         "            fd = fd if fd >= 0 else kernel.dup_for_client(source)\n"
         "            self.__dict__[f'fd{source}'] = fd\n"),
    ],
    "free.by-value": [
        ("orin/kernel/nvmap.py", 'self.note_rule("free.by-value")',
         'self._require_own_handle(number, "alloc.handle")'),
    ],
    "free.fd": [("orin/kernel/nvmap.py", "            real_close(number)\n", "            pass\n")],
    "fromva.rest": [("orin/kernel/nvmap.py", "size = area[0] - va", "size = PAGE")],
    "rw.residue": [
        ("orin/kernel/nvmap.py", "done = left or done + size", "done = done + size - left"),
    ],
    "heaps.carveouts": [("orin/kernel/nvmap.py", '["heaps"] = HEAP_VPR', '["heaps"] = HEAPS')],
    "dmabuf.sigbus": [
        ("orin/kernel/nvmap_handles.py", "        status = os.fstat(fd)\n",
         "        status = os.fstat(fd)\n        os.ftruncate(fd, size)\n"),
    ],
    "dmabuf.lifetime": [
        ("memory.py", "if not self.refs and not self.freed:", "if False:"),
        ("memory.py", "if not self.refs and not self.freed:", "if not self.freed:"),
    ],
    "profile.setup-bind": [
        ("orin/kernel/device_file.py", "known = tables.by_number.get(request)\n",
         "known = tables.by_number.get(request)\n"
         '        if (letter, ioc_nr(request), size) == ("H", 128, 80):\n'
         "            known = None\n"),
        ("orin/kernel/device_file.py", "known = tables.by_number.get(request)\n",
         "known = tables.by_number.get(request)\n"
         '        if (letter, ioc_nr(request), size) == ("H", 128, 104):\n'
         "            known = None\n"),
    ],
    "profile.sm-record": [
        ("orin/kernel/tsg.py", 'min(args["record_size"], record.struct.size)',
         'min(args["record_size"], 24 if record.struct.size == 32 else 32)'),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Breakage:
    """`rule` is broken when bytes [start, end) of `file` (below nvgpusim/) become `new`.

    `line` is where the model names the rule, `what` is the part of it that is broken.
    """

    rule: str
    file: str
    line: int
    what: str
    start: int
    end: int
    new: str

    def source(self) -> bytes:
        """The broken file."""
        raw = (ROOT / self.file).read_bytes()
        return raw[: self.start] + self.new.encode() + raw[self.end :]


def breakages() -> list[Breakage]:
    """All of them, by rule."""
    found = list(_behaviours())
    sources = [Source(file) for file in sorted(KERNEL.glob("*.py"))]
    passed = _arguments(sources)
    for source in sources:
        found += _refusals(source, passed)
    return sorted(found, key=lambda b: (b.rule, b.file, b.line, b.what))


def _behaviours() -> Iterator[Breakage]:
    for rule, changes in BEHAVIOURS.items():
        for name, old, new in changes:
            raw = (ROOT / name).read_bytes()
            times = raw.count(old.encode())
            assert times == 1, f"{rule}: {times} times in {name}: {old}"
            start = raw.index(old.encode())
            line, what = raw.count(b"\n", 0, start) + 1, " ".join(new.split())
            yield Breakage(rule, name, line, what, start, start + len(old.encode()), new)


class Source:
    """A file of the model: its functions, and where its nodes stand."""

    def __init__(self, path: Path) -> None:
        self.name = str(path.relative_to(ROOT))
        raw = path.read_bytes()
        self.tree = ast.parse(raw)
        self._lines = [0]
        for text in raw.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(text))
        self.functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)]

    def place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The bytes [start, end) of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset


def _refusals(source: Source, passed: dict[tuple[str, int], set[str]]) -> Iterator[Breakage]:
    """Each raise of a rule, and each part of the condition that stands before it."""
    guards = {
        id(node): guard.test
        for guard in ast.walk(source.tree)
        if isinstance(guard, ast.If)
        for node in guard.body
    }
    for function in source.functions:
        for node in ast.walk(function):
            named = _named(node)
            if named is None or not isinstance(node, ast.Raise):
                continue
            if isinstance(named, ast.Name):
                for rule in sorted(_values(named.id, function, passed)):
                    new, (start, _) = f"if {named.id} != {rule!r}: ", source.place(node)
                    what = f"in {function.name}"
                    yield Breakage(rule, source.name, node.lineno, what, start, start, new)
            elif isinstance(named, ast.Constant) and isinstance(named.value, str):
                test = guards.get(id(node))
                changes = list(_without(test)) if test is not None else []
                place = source.place(test) if test is not None and changes else source.place(node)
                for what, new in changes or [(f"in {function.name}", "pass")]:
                    yield Breakage(named.value, source.name, node.lineno, what, *place, new)


def _named(node: ast.AST) -> ast.expr | None:
    """The expression that names the rule in a `raise` of a KernelError."""
    if isinstance(node, ast.Raise) and isinstance(call := node.exc, ast.Call):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("refusal", "KernelError"):
            return call.args[0]
    return None


def _without(test: ast.expr) -> Iterator[tuple[str, str]]:
    """Each part of a condition, and the condition without it."""
    match test:
        case ast.BoolOp(ast.Or(), values):
            for value in values:
                left = [f"({ast.unparse(v)})" for v in values if v is not value]
                yield ast.unparse(value), f"({' or '.join(left)})"
        case ast.UnaryOp(ast.Not(), ast.Compare(left, [_, _] as ops, [a, b])):
            first = ast.unparse(ast.Compare(left, ops[:1], [a]))
            second = ast.unparse(ast.Compare(a, ops[1:], [b]))
            yield first, f"not {second}"
            yield second, f"not {first}"


def _arguments(sources: list[Source]) -> dict[tuple[str, int], set[str]]:
    """Rules that are arguments: by the name of the function and the argument's number."""
    found: dict[tuple[str, int], set[str]] = {}
    for call in (node for source in sources for node in ast.walk(source.tree)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            for place, argument in enumerate(call.args):
                found.setdefault((call.func.attr, place), set()).update(_rules(argument))
    return found


def _rules(node: ast.AST) -> set[str]:
    constants = (c.value for c in ast.walk(node) if isinstance(c, ast.Constant))
    return {value for value in constants if isinstance(value, str) and value in RULES}


def _values(
    name: str, function: ast.FunctionDef, passed: dict[tuple[str, int], set[str]]
) -> set[str]:
    """Rules that a variable of `function` may hold: what callers pass, or what it assigns."""
    arguments = [a.arg for a in function.args.args]
    if name in arguments:
        return passed[function.name, arguments.index(name) - 1]  # without self
    return {
        rule
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        for rule in _rules(node.value)
    }
