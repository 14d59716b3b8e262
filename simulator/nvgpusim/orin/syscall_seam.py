"""The seam that catches a Python program's system calls: the wrappers that reach the kernel.

Standard library only, and nothing of the model: the simulator and the recorder for a real board
both stand on it. A :class:`SyscallBackend` sees the calls; one that returns NotImplemented lets
the host kernel answer.

Caught: os.open, open() and io.open on the device nodes; os.close, os._exit; os.stat, os.lstat,
os.access, os.listdir (so os.path.exists and pathlib too); fcntl.ioctl; mmap.mmap on a caught fd;
select.poll and select.select (events show once); and open, close, ioctl, mmap, mmap64, munmap,
mremap and msync of libc looked up through ctypes.CDLL, as are the barrier functions
atomic_thread_fence, __sync_synchronize, dmb and dsb of any library. dup, fork, CLOEXEC and poll
need no help: the fds are real.

Not caught: system calls made by C code, other processes that are not Python, os.scandir and glob on
/dev/nvgpu, and functions that were bound before the seam was installed.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import io
import mmap
import operator
import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_libc = ctypes.CDLL(None)
_NO_FD = 0x7FFFFFFF
_HOOKED = ("open", "open64", "close", "ioctl", "mmap", "mmap64", "munmap", "mremap", "msync")
_BARRIERS = ("atomic_thread_fence", "__sync_synchronize", "dmb", "dsb")


class SyscallBackend:
    """Answers of the seam's user; every default is "ask the host kernel"."""

    imposes = False
    """True if mappings are not inherited, as the driver makes them, and `maps_shared` is asked."""

    def owns_path(self, path: str) -> bool:
        """True if `path` is a device node of the backend's."""
        return False

    def listdir(self, path: str) -> list[str] | None:
        """Names to show in a directory, None when it is not the backend's."""
        return None

    def open(self, path: str, flags: int) -> Any:
        """An fd for an owned path; raises OSError."""
        return NotImplemented

    def on_closed(self, fd: int) -> None:
        """`fd` has been closed."""

    def before_close(self, fd: int) -> Any:
        """`fd` is about to be closed; the result is given to `after_close`."""
        return None

    def after_close(self, token: Any) -> None:
        """The close that `before_close` saw is done."""

    def ioctl(self, fd: int, request: int, arg: int, size: int) -> Any:
        """The result of ioctl; `size` bytes at `arg` are known to be valid (0: not known)."""
        return NotImplemented

    def fd_to_map(self, fd: int, length: int, offset: int) -> Any:
        """(fd to map, token) in place of `fd`; raises OSError."""
        return NotImplemented

    def maps_shared(self, token: Any) -> bool:
        """True if the driver makes a private mapping of this a shared one."""
        return True

    def on_mapped(self, address: int, length: int, token: Any) -> None:
        """A mapping was made; token is None for a foreign fd or anonymous memory."""

    def on_unmapping(self, address: int, length: int) -> None:
        """A range is about to be unmapped or replaced."""

    def on_msync(self, address: int) -> None:
        """msync of an address; raises OSError to refuse it."""

    def on_barrier(self) -> None:
        """A memory barrier was executed by a library function."""

    def on_polled(self, fds: list[int]) -> None:
        """poll or select has reported these fds."""

    def on_page_cache_given_up(self, piece: tuple[int, int, int], size: int) -> None:
        """`size` bytes of a file, by device, inode and offset, need not stay in memory."""

    def on_exit(self) -> None:
        """os._exit is about to end the process."""


class RealFunctions:
    """The functions that a hook stands for, as they were when the seam was made."""

    def __init__(self) -> None:
        self.os_open, self.io_open = os.open, io.open
        self.close, self.exit, self.access, self.listdir = os.close, os._exit, os.access, os.listdir
        self.posix_fadvise = os.posix_fadvise
        self.ioctl, self.poll, self.select = fcntl.ioctl, select.poll, select.select


class SyscallSeam:
    """The hooks of a process. :meth:`install` once; :meth:`remove` undoes it."""

    def __init__(self, backend: SyscallBackend) -> None:
        self.backend = backend
        self.real = RealFunctions()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Put every hook in place."""
        for module, name, hook in (
            (os, "open", self._os_open),
            (os, "close", self._os_close),
            (os, "_exit", self._os_exit),
            (os, "posix_fadvise", self._os_posix_fadvise),
            (os, "stat", self._make_stat(os.stat)),
            (os, "lstat", self._make_stat(os.lstat)),
            (os, "access", self._os_access),
            (os, "listdir", self._os_listdir),
            (io, "open", self._builtin_open),
            (builtins, "open", self._builtin_open),
            (fcntl, "ioctl", self._fcntl_ioctl),
            (select, "poll", self._select_poll),
            (select, "select", self._select_select),
            (mmap, "mmap", self._make_mmap_class()),
            (ctypes.CDLL, "__getitem__", self._make_cdll_getitem()),
        ):
            self.replace_attribute(module, name, hook)

    def remove(self) -> None:
        """Take every hook out."""
        while self._undo:
            self._undo.pop()()

    def replace_attribute(self, owner: Any, name: str, hook: Any) -> None:
        """Put `hook` in place of an attribute until :meth:`remove`."""
        real = getattr(owner, name)
        setattr(owner, name, hook)
        self._undo.append(lambda: setattr(owner, name, real))

    # os

    def _owned_path(self, path: Any) -> str | None:
        if isinstance(path, int):
            return None
        try:
            name = os.fsdecode(path)
        except TypeError:
            return None
        return name if name.startswith(_PLACES) and self.backend.owns_path(name) else None

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        name = self._owned_path(path)
        if name is not None:
            fd = self.backend.open(name, flags)
            if fd is not NotImplemented:
                return int(fd)
        return int(self.real.os_open(path, flags, mode, dir_fd=dir_fd))

    def _builtin_open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        name = self._owned_path(file)
        if name is not None:
            both = os.O_RDWR if "+" in mode or "w" in mode else os.O_RDONLY
            fd = self.backend.open(name, both | os.O_CLOEXEC)
            if fd is not NotImplemented:
                return self.real.io_open(fd, mode, *args, **kwargs)
        return self.real.io_open(file, mode, *args, **kwargs)

    def _os_close(self, fd: int) -> None:
        token = self.backend.before_close(fd)
        self.real.close(fd)
        self.backend.on_closed(fd)
        self.backend.after_close(token)

    def _os_posix_fadvise(self, fd: int, offset: int, length: int, advice: int) -> None:
        self.real.posix_fadvise(fd, offset, length, advice)
        if advice == os.POSIX_FADV_DONTNEED:
            status = os.fstat(fd)
            piece = (status.st_dev, status.st_ino, offset)
            self.backend.on_page_cache_given_up(piece, length or status.st_size - offset)

    def _os_exit(self, status: int) -> None:
        self.backend.on_exit()
        self.real.exit(status)

    def _make_stat(self, real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            name = os.fspath(path) if hasattr(path, "__fspath__") else path
            if isinstance(name, str) and not name.startswith("/dev/"):  # imports live on stat
                return real(path, *args, **kwargs)
            if self._owned_path(name) is not None:
                # a character device, 0666, owned by root
                return os.stat_result((0o020666, 0, 0, 1, 0, 0, 0, 0, 0, 0))
            if self._owned_directory_names(name) is not None:
                return os.stat_result((0o040755, 0, 0, 2, 0, 0, 0, 0, 0, 0))
            return real(path, *args, **kwargs)

        return stat

    def _owned_directory_names(self, path: Any) -> list[str] | None:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not isinstance(name, str) or not name.startswith("/dev/"):
            return None
        return self.backend.listdir(name.rstrip("/"))

    def _os_access(self, path: Any, mode: int, **kwargs: Any) -> bool:
        if self._owned_path(path) is not None:
            return not mode & os.X_OK
        return bool(self.real.access(path, mode, **kwargs))

    def _os_listdir(self, path: Any = ".") -> list[Any]:
        names = self._owned_directory_names(path)
        if names is not None:
            return names
        return list(self.real.listdir(path))

    # ioctl

    def _fcntl_ioctl(self, fd: Any, request: int, arg: Any = 0, mutate_flag: bool = True, /) -> Any:
        with suppress(OSError):  # EBADF: what Python itself refuses, with its own words
            self.real.ioctl(_NO_FD, request, arg, mutate_flag)
        number, request = _descriptor_number(fd), operator.index(request)
        if hasattr(arg, "__index__"):
            result = self.backend.ioctl(number, request, arg.__index__() & 0xFFFFFFFFFFFFFFFF, 0)
        else:
            view = memoryview(arg.encode() if isinstance(arg, str) else arg)
            size = max(view.nbytes, request >> 16 & 0x3FFF)
            # Past the end of a short buffer the kernel sees the interpreter's stack: garbage.
            space = (ctypes.c_char * size).from_buffer(bytearray(b"\xa5" * size))
            ctypes.memmove(space, view.tobytes(), view.nbytes)
            result = self.backend.ioctl(number, request, ctypes.addressof(space), size)
            if result is not NotImplemented:
                out = space.raw[: view.nbytes]
                if mutate_flag and not view.readonly:
                    view.cast("B")[:] = out
                else:
                    return out
        if result is NotImplemented:
            return self.real.ioctl(fd, request, arg, mutate_flag)
        return result

    # mmap

    def _make_mmap_class(self) -> type:
        seam, real = self, mmap.mmap

        class Mmap(real):  # type: ignore[misc, valid-type]
            def __new__(cls, fileno: int, length: int, *args: Any, **kwargs: Any) -> Any:
                got = (
                    seam.backend.fd_to_map(fileno, length, kwargs.get("offset", 0))
                    if fileno >= 0
                    else NotImplemented
                )
                if got is NotImplemented:
                    return real.__new__(cls, fileno, length, *args, **kwargs)
                fd, token = got
                self = real.__new__(cls, fd, length, *args, **kwargs)
                if seam.backend.imposes:
                    self.madvise(mmap.MADV_DONTFORK)
                address = ctypes.addressof(ctypes.c_char.from_buffer(self))
                self.nvgpu_range = (address, length)
                seam.backend.on_mapped(address, length, token)
                return self

            def close(self) -> None:
                span = getattr(self, "nvgpu_range", None)
                super().close()
                if span is not None:
                    del self.nvgpu_range
                    seam.backend.on_unmapping(*span)

            def flush(self, *args: Any) -> None:
                span = getattr(self, "nvgpu_range", None)
                if span is not None:
                    seam.backend.on_msync(span[0])
                super().flush(*args)

            def __del__(self) -> None:
                span = getattr(self, "nvgpu_range", None)
                if span is not None:
                    seam.backend.on_unmapping(*span)

        Mmap.__name__ = Mmap.__qualname__ = "mmap"
        Mmap.__module__ = "mmap"
        return Mmap

    # ctypes

    def _make_cdll_getitem(self) -> Callable[[Any, Any], Any]:
        seam, real, libc = self, ctypes.CDLL.__getitem__, ctypes.CDLL(None)

        def getitem(library: Any, name: Any) -> Any:
            function = real(library, name)
            if isinstance(library, ctypes.PyDLL) or not (
                name in _BARRIERS
                or (
                    name in _HOOKED
                    and _c_function_address(function) == _c_function_address(real(libc, name))
                )
            ):
                return function
            kind = "barrier" if name in _BARRIERS else name.removesuffix("64")
            hook = getattr(seam, f"_c_{kind}")

            class Hooked(library._FuncPtr):  # type: ignore[misc]
                _flags_ = library._FuncPtr._flags_
                _restype_ = library._FuncPtr._restype_

                def __call__(self, *args: Any) -> Any:
                    function.argtypes, function.restype = self.argtypes, self.restype
                    return hook(function, self, args)

            hooked = Hooked((name, library))
            hooked.__name__ = name
            return hooked

        return getitem

    def _set_errno_return_minus_one(self, function: Any, error: OSError) -> Any:
        ctypes.set_errno(error.errno or errno.EIO)
        restype = function.restype
        if restype is None:
            return None
        value = restype(-1)
        return getattr(value, "value", value)

    def _c_open(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        path = getattr(args[0], "value", args[0])
        name = self._owned_path(path) if isinstance(path, (bytes, str)) else None
        if name is not None:
            try:
                fd = self.backend.open(name, _int_of_ctypes(args[1]))
            except OSError as error:
                return self._set_errno_return_minus_one(function, error)
            if fd is not NotImplemented:
                return fd
        return real(*args)

    def _c_close(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        token = self.backend.before_close(_int_of_ctypes(args[0]))
        result = real(*args)
        self.backend.on_closed(_int_of_ctypes(args[0]))
        self.backend.after_close(token)
        return result

    def _c_ioctl(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        fd, request = _int_of_ctypes(args[0]), _int_of_ctypes(args[1])
        try:
            arg = _address_of_argument(args[2]) if len(args) > 2 else 0
            result = self.backend.ioctl(fd, request, arg, 0)
        except OSError as error:
            return self._set_errno_return_minus_one(function, error)
        return real(*args) if result is NotImplemented else result

    def _c_mmap(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        address, length, _, flags, fd, offset = (_int_of_ctypes(a) for a in args)
        token, given = None, args
        if fd >= 0 and not flags & mmap.MAP_ANONYMOUS:
            try:
                got = self.backend.fd_to_map(fd, length, offset)
            except OSError as error:
                return self._set_errno_return_minus_one(function, error)
            if got is not NotImplemented:
                inner, token = got
                if self.backend.imposes and self.backend.maps_shared(token):
                    flags = flags & ~mmap.MAP_PRIVATE | mmap.MAP_SHARED
                given = (*args[:3], flags, inner, args[5])
        result = real(*given)
        mapped = _int_of_ctypes(result) & 0xFFFFFFFFFFFFFFFF
        if mapped < 1 << 63 and (token is not None or flags & 0x10 or address):
            if token is not None and self.backend.imposes:
                _libc.madvise(ctypes.c_void_p(mapped), ctypes.c_size_t(length), mmap.MADV_DONTFORK)
            self.backend.on_mapped(mapped, length, token)
        return result

    def _c_munmap(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        self.backend.on_unmapping(_int_of_ctypes(args[0]), _int_of_ctypes(args[1]))
        return real(*args)

    def _c_mremap(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        self.backend.on_unmapping(_int_of_ctypes(args[0]), _int_of_ctypes(args[1]))
        return real(*args)

    def _c_msync(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        try:
            self.backend.on_msync(_int_of_ctypes(args[0]))
        except OSError as error:
            return self._set_errno_return_minus_one(function, error)
        return real(*args)

    def _c_barrier(self, real: Any, function: Any, args: tuple[Any, ...]) -> Any:
        result = real(*args)
        self.backend.on_barrier()
        return result

    # poll

    def _select_poll(self) -> Any:
        seam, poller = self, self.real.poll()

        class Poll:
            def __getattr__(self, name: str) -> Any:
                return getattr(poller, name)

            def poll(self, *args: Any) -> list[tuple[int, int]]:
                found: list[tuple[int, int]] = poller.poll(*args)
                seam.backend.on_polled([fd for fd, _ in found])
                return found

        return Poll()

    def _select_select(self, r: Any, w: Any, x: Any, *timeout: Any) -> Any:
        found = self.real.select(r, w, x, *timeout)
        ready = [f if isinstance(f, int) else f.fileno() for f in {*found[0], *found[2]}]
        self.backend.on_polled(ready)
        return found


_PLACES = ("/dev/", "/proc/meminfo")
"""Folders of a backend's paths; others are the host's without a question."""


def _descriptor_number(fd: Any) -> int:
    """The number of a descriptor, of whatever has fileno(); -1 for what is neither."""
    if not isinstance(fd, int) and hasattr(fd, "fileno"):
        fd = fd.fileno()
    return fd if isinstance(fd, int) else -1


def _c_function_address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _int_of_ctypes(value: Any) -> int:
    value = getattr(value, "value", value)
    return 0 if value is None else int(value)


def _address_of_argument(value: Any) -> int:
    """The address that ctypes would pass for an ioctl's pointer argument."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFFFFFFFFFFFFFFFF
    if isinstance(value, ctypes._SimpleCData):
        return _int_of_ctypes(value) & 0xFFFFFFFFFFFFFFFF
    if isinstance(value, bytes):
        return _int_of_ctypes(ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p))
    if isinstance(value, (ctypes.Array, ctypes.Structure, ctypes.Union)):
        return ctypes.addressof(value)
    if hasattr(value, "_obj"):
        return ctypes.addressof(value._obj)
    return _int_of_ctypes(ctypes.cast(value, ctypes.c_void_p))
