"""The kernel's rules, by name.

Every refusal of the model names the rule that it follows, so that a report can say which rules a
run exercised and a test can say which it breaks. `errno` is what the client gets; a rule without
one is a behaviour that clients must reckon with. `source` says where it is known from: K36 and K35
are OE4T/linux-nvgpu of that release, N36 OE4T/linux-nv-oot (nvmap), K38 r38's and r39's nvgpu in
forecr/forecr_xavier_kernel, E an AGX Orin, D derived from these and chosen strictly.
"""

from __future__ import annotations

import errno as e
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One rule: the errno (0: none), what it says, and its source."""

    errno: int
    text: str
    source: str


class KernelError(Exception):
    """A refusal: `rule` names it, `errno` is what the system call returns."""

    def __init__(self, rule: str, detail: str = "", errno: int | None = None) -> None:
        self.rule, self.detail = rule, detail
        self.errno = RULES[rule].errno if errno is None else errno
        super().__init__(f"{rule}: {detail or RULES[rule].text}")


_TABLE: dict[str, list[tuple[str, int, str]]] = {
    "K36 os/linux/ioctl_*.c": [
        ("dispatch.type", e.EINVAL, "an nvgpu fd takes only its own ioctl letter"),
        ("dispatch.nr", e.EINVAL, "number 0 or past the last of this driver"),
        ("dispatch.size", e.EINVAL, "argument larger than the largest of this fd"),
        ("dispatch.unknown", e.ENOTTY, "in range, but not this driver's direction and size"),
        ("dispatch.fault", e.EFAULT, "the argument struct cannot be read"),
        ("dispatch.copyback", 0, "the struct is written back only when the ioctl succeeds"),
        ("dispatch.residue", 0, "a bad second buffer gives a positive count of bytes not copied"),
        ("dispatch.not-modelled", e.ENOTTY, "in the kernel, not modelled"),
        ("fd.cloexec", 0, "every fd that the driver makes is O_CLOEXEC"),
        ("fd.full", e.EMFILE, "descriptor table full"),
        ("fd.mmap", e.ENODEV, "only ctrl and dmabufs can be mapped"),
        ("fd.fork", 0, "fds survive fork, the mappings behind them do not"),
    ],
    "K36 ioctl_ctrl.c": [
        ("chars.size", 0, "copies min(size in, sizeof), returns sizeof: the layout by its size"),
        ("as.big-page", e.EINVAL, "big_page_size is 0 or one of available_big_page_sizes"),
        ("as.node", e.EINVAL, "the `as` node asks for 64 KiB pages, which L4T does not have"),
        ("as.range", e.EINVAL, "va_range_start and _end non-zero multiples of 2 MiB, in order"),
        ("as.split", e.EINVAL, "va_range_split is 0 with UNIFIED_VA or without big pages"),
        ("as.limit", e.ENOMEM, "start + size + 4 GiB is at most 2^49"),
        ("as.flags", 0, "unknown ALLOC_AS flags are ignored"),
        ("tsg.share", e.EINVAL, "without SHARE, instance id and token are 0; a token must exist"),
        ("tsg.none-left", e.ENOMEM, "all TSGs are taken"),
        ("channel.runlist", e.EINVAL, "runlist is -1 or an active one"),
        ("channel.none-left", e.ENOMEM, "no channel is free"),
        ("engine.size", 0, "GET_ENGINE_INFO returns items x 16, also for a short buffer"),
        ("flush.none", e.EINVAL, "at least one of l2_flush and fb_flush"),
        ("flush.invalidate", e.EINVAL, "l2_invalidate only together with l2_flush"),
        ("time.count", e.EINVAL, "at most 16 correlation samples"),
        ("time.source", e.EINVAL, "source 1 (TSC), from r36 also 2 (OS time)"),
        ("gpc.size", e.EINVAL, "a GPC map's buffer holds 4 bytes for each enabled GPC, no more"),
        ("gpc.fault", e.EFAULT, "the GPC map can be written"),
        ("doorbell.busy", e.EBUSY, "one live mapping of the doorbell page per fd"),
        ("doorbell.length", e.EINVAL, "at most 64 KiB"),
        ("doorbell.offset", e.EINVAL, "offset 0"),
    ],
    "K36 ioctl_as.c, vm.c, vm_area.c": [
        ("as.bind-fd", e.EINVAL, "BIND_CHANNEL takes a channel fd"),
        ("as.bind-twice", e.EINVAL, "a channel has one address space"),
        ("space.page-size", e.EINVAL, "page_size is 4096"),
        ("space.taken", e.ENOMEM, "fixed: aligned, inside the user region, free; else room"),
        ("space.free-unknown", 0, "FREE_SPACE of an unknown address succeeds"),
        ("space.free-unmaps", 0, "FREE_SPACE drops a reference of each mapping inside"),
        ("map.badfd", e.EBADF, "dmabuf_fd is an open fd"),
        ("map.not-dmabuf", e.EINVAL, "dmabuf_fd is a dmabuf"),
        ("map.not-fixed", e.EINVAL, "without FIXED_OFFSET all offsets and sizes are 0"),
        ("map.range", e.EINVAL, "buffer_offset + mapping_size lies inside the buffer"),
        ("map.rest", e.EINVAL, "mapping_size 0 is the buffer's size, whatever buffer_offset"),
        ("map.start", e.ENOMEM, "buffer_offset is a multiple of 4 KiB"),
        ("map.compressible", e.EINVAL, "fixed compressible: address and offset alike in 64 KiB"),
        ("map.access", e.EINVAL, "access 0, 1 or 2, and not 2 for a read-only dmabuf"),
        ("map.flags", e.EINVAL, "only flag bits that this release knows"),
        ("map.tegra-raw", e.EINVAL, "TEGRA_RAW is not supported on ga10b"),
        ("map.kinds", e.ENOMEM, "a compr_kind, or an incompr_kind of 0..255"),
        ("map.fixed", e.EINVAL, "fixed: 4 KiB aligned, inside an ALLOC_SPACE area, free"),
        ("map.exhausted", e.ENOMEM, "the user region is exhausted"),
        ("map.again", 0, "the same buffer, kind and flags again: same address, a reference more"),
        ("map.holds", 0, "a mapping holds the dmabuf: fd and handle may go"),
        ("map.batch", e.EINVAL, "at most 256 maps and 256 unmaps in a batch"),
        ("map.batch-fault", e.EFAULT, "the entries of a batch can be read"),
        ("unmap.unknown", 0, "UNMAP_BUFFER of an unknown address succeeds"),
        ("unmap.at-once", 0, "the last unmap takes effect at once and frees the address"),
        ("regions.fault", e.EFAULT, "the region buffer can be written"),
    ],
    "K36 ioctl_tsg.c, tsg.c, tsg_subctx.c": [
        ("subctx.type", e.EINVAL, "type 0 SYNC or 1 ASYNC"),
        ("subctx.as", e.EINVAL, "as_fd is an address space"),
        ("subctx.none-left", e.ENOSPC, "no VEID is left"),
        ("subctx.fallback", 0, "with all of 1..63 taken ASYNC falls back to VEID 0"),
        ("subctx.delete", e.EINVAL, "DELETE_SUBCONTEXT of a VEID below 64 without channels"),
        ("subctx.delete-free", 0, "DELETE_SUBCONTEXT of a VEID that is free succeeds"),
        ("bind.fd", e.EINVAL, "a channel fd"),
        ("bind.veid", e.EINVAL, "VEID below max_veid_count_per_tsg"),
        ("bind.locked", e.EPERM, "no scheduler client holds the control lock"),
        ("bind.vm", e.EINVAL, "the channel's AS is the VEID's (or both have none)"),
        ("bind.no-sync", e.ENOSPC, "VEID 0 was taken by a channel that had no address space"),
        ("bind.subctx-vm", e.EINVAL, "channels of a VEID in a TSG share one address space"),
        ("bind.full", e.EINVAL, "at most 128 channels in a TSG"),
        ("bind.twice", e.EINVAL, "a channel is in one TSG"),
        ("bind.runlist", e.EINVAL, "all channels of a TSG are on one runlist"),
        ("bind.sync", 0, "VEID 0 makes the sync subcontext on the fly"),
        ("unbind.not-member", e.EINVAL, "the channel is in this TSG"),
        ("unbind.unserviceable", 0, "a channel outside a TSG is unserviceable"),
        ("timeslice.range", e.EINVAL, "1000..50000 microseconds"),
        ("interleave.level", e.EINVAL, "SET_RUNLIST_INTERLEAVE: level 0..2"),
        ("event.cmd", e.EINVAL, "EVENT_ID_CTRL: cmd 1 (enable) only"),
        ("event.id", e.EINVAL, "event id 0..5"),
        ("event.poll", 0, "a posted event shows once as POLLPRI | POLLIN"),
        ("sm.id", e.EINVAL, "sm_id below the number of SMs"),
    ],
    "K36 ioctl_channel.c, channel.c, linux-channel.c": [
        ("channel.gone", e.ETIMEDOUT, "a channel without references answers every ioctl so"),
        ("wdt.status", e.EINVAL, "exactly one of disable (1) and enable (2)"),
        ("wdt.deterministic", e.EINVAL, "a deterministic channel may only disable it"),
        ("setup.few", e.EINVAL, "at least 2 entries with USERMODE, else 4"),
        ("setup.pow2", e.EINVAL, "entries is a power of two"),
        ("setup.many", e.EINVAL, "entries x 8 fits 32 bits"),
        ("setup.unbound", e.EINVAL, "AS and TSG are bound before"),
        ("setup.twice", e.EEXIST, "once per channel"),
        ("setup.watchdog", e.EINVAL, "DETERMINISTIC needs the watchdog off"),
        ("setup.usermode", e.EINVAL, "USERMODE needs DETERMINISTIC"),
        ("setup.vpr", e.EINVAL, "VPR is not supported"),
        ("setup.fd-zero", e.EINVAL, "gpfifo and userd fds are not 0"),
        ("setup.offset", e.EINVAL, "both offsets are 0"),
        ("setup.gpfifo-badfd", e.EBADF, "the gpfifo fd is open"),
        ("setup.gpfifo-fd", e.EINVAL, "the gpfifo fd is a dmabuf"),
        ("setup.gpfifo-small", e.EINVAL, "the gpfifo holds max(4096, entries x 8) bytes"),
        ("setup.no-room", e.ENOMEM, "the whole gpfifo dmabuf fits the kernel region"),
        ("setup.userd-badfd", e.EBADF, "the userd fd is open"),
        ("setup.userd-fd", e.EINVAL, "the userd fd is a dmabuf"),
        ("setup.userd-as-is", 0, "USERD is used as it is: the client has zeroed it"),
        ("submit.usermode", e.EINVAL, "SUBMIT_GPFIFO is refused on a usermode channel"),
        ("obj.unbound", e.EINVAL, "ALLOC_OBJ_CTX needs AS and TSG"),
        ("obj.class", e.EINVAL, "the class is one that ga10b's driver knows"),
        ("obj.graphics-async", e.EINVAL, "a graphics class stays on VEID 0 and run queue 0"),
        ("obj.compute-queue", e.EINVAL, "asynchronous compute and graphics keep to their queues"),
        ("notifier.mem", e.EINVAL, "mem is a dmabuf fd"),
        ("notifier.offset", e.EINVAL, "offset + 16 lies inside the buffer"),
        ("notifier.zeroed", 0, "SET_ERROR_NOTIFIER zeroes the record"),
        ("notifier.first", 0, "the first error is kept: timestamp, info32, status 0xFFFF"),
        ("preempt.no-class", e.EINVAL, "SET_PREEMPTION_MODE after ALLOC_OBJ_CTX"),
        ("preempt.no-tsg", e.EINVAL, "SET_PREEMPTION_MODE of a channel in a TSG"),
        ("preempt.mode", e.EINVAL, "a mode has one supported bit at least"),
        ("preempt.lower", e.EINVAL, "preemption modes are never lowered"),
        ("preempt.pair", e.EINVAL, "GFXP and CILP not in one call"),
        ("preempt.cilp", e.EINVAL, "compute beside graphics does not go with CILP"),
        ("preempt.class", e.EINVAL, "only compute and graphics classes have preemption modes"),
        ("preempt.no-context", e.EINVAL, "the context is mapped in the channel's address space"),
        ("channel.no-tsg", e.EINVAL, "CHANNEL_PREEMPT of a channel in a TSG"),
        ("syncpt.none-left", e.ENOMEM, "a syncpoint is left"),
        ("syncpt.same", 0, "GET_USER_SYNCPOINT returns the same id every time"),
        ("wait.dead", e.ETIMEDOUT, "WAIT and SUBMIT on an unserviceable channel"),
        ("wait.type", e.EINVAL, "WAIT: type 0 notifier, 1 semaphore"),
        ("wait.offset", e.EINVAL, "WAIT: a semaphore's offset is a multiple of 4"),
        ("wait.notifier", e.EINVAL, "WAIT takes a dmabuf and a place inside it"),
        ("wait.expired", e.EINTR, "WAIT for a notifier that does not come in time"),
        ("reset.forced", 0, "FORCE_RESET sets notifier 43 and kills the TSG"),
        ("timedout.set", 0, "GET_TIMEDOUT is 1 once the channel is unserviceable"),
        ("kill.tsg", 0, "an error kills every channel of the TSG, for good"),
        ("nvmap-fd.noop", 0, "SET_NVMAP_FD does nothing"),
    ],
    "N36 drivers/video/tegra/nvmap": [
        ("nvmap.type", e.ENOTTY, "wrong letter or number past 107"),
        ("nvmap.unknown", e.ENOTTY, "in range, but not nvmap's direction and size"),
        ("nvmap.fault", e.EFAULT, "the argument struct cannot be read or written"),
        ("nvmap.mmap", e.EPERM, "/dev/nvmap itself cannot be mapped"),
        ("create.zero", e.EINVAL, "size is not 0"),
        ("create.handle64", 0, "CREATE_64 returns the handle in the low 32 bits at 0"),
        ("create.high", 0, "handle ids run from 0x7FFFFFFF upwards, never 0"),
        ("alloc.align", e.EINVAL, "align is a power of two or 0"),
        ("alloc.numa", e.EINVAL, "numa_nid is -1 or a node"),
        ("alloc.handle", e.EINVAL, "a handle of this client"),
        ("alloc.heap", e.ENOMEM, "heap_mask names a heap that exists"),
        ("alloc.ram", e.ENOMEM, "not larger than RAM (r38: than free memory), or the carve-out"),
        ("alloc.twice", e.EEXIST, "a handle is allocated once"),
        ("alloc.exclusive", e.EINVAL, "the IVM and VIDMEM heaps stand alone in heap_mask"),
        ("alloc.zeroed", 0, "IOVMM pages are zeroed"),
        ("alloc.tag", 0, "tag 0 is allowed; the kernel warns once per client"),
        ("getfd.badfd", e.EBADF, "an unknown handle is tried as an fd: not open"),
        ("getfd.not-dmabuf", e.EINVAL, "an unknown handle is tried as an fd: no dmabuf"),
        ("getfd.full", e.EFAULT, "descriptor table full: EFAULT, not EMFILE"),
        ("getfd.new", 0, "each call makes a new fd"),
        ("fromfd.badfd", e.EBADF, "FROM_FD of an fd that is not open"),
        ("fromfd.not-dmabuf", e.EINVAL, "FROM_FD of an fd that is no dmabuf"),
        ("free.by-value", 0, "FREE takes the handle by value; unknown ones succeed"),
        ("free.fd", 0, "FREE of the number of an open dmabuf fd closes that fd"),
        ("fromva.align", e.EINVAL, "va is page aligned"),
        ("fromva.vma", e.EINVAL, "va lies in a mapping, writable unless RO"),
        ("fromva.size", e.ENOMEM, "not larger than memory"),
        ("fromva.pin", e.EINVAL, "all pages can be pinned"),
        ("fromva.rest", 0, "size 0 means to the end of the mapping"),
        ("nvmap.param", e.ENOTTY, "PARAM is in the header, not in the driver"),
        ("param.handle", e.ENODEV, "PARAMETERS of a handle of this client"),
        ("cache.op", e.EINVAL, "CACHE: an address, op 0..2"),
        ("cache.handle", e.EINVAL, "CACHE of a handle of this client"),
        ("cache.address", e.EADDRNOTAVAIL, "CACHE of a range inside one mapping of a dmabuf"),
        ("cache.other", e.EFAULT, "CACHE of a mapping of this handle"),
        ("rw.empty", e.EINVAL, "READ and WRITE: address, elem_size and count are not 0"),
        ("rw.handle", e.EINVAL, "READ and WRITE of a handle of this client"),
        ("rw.read-only", e.EPERM, "WRITE of a handle that is not read-only"),
        ("rw.cpu", e.EPERM, "READ and WRITE of allocated memory that the CPU may see"),
        ("rw.range", e.EINVAL, "elements lie inside the handle, strides hold an element"),
        ("rw.residue", 0, "bytes left uncopied are returned as if they had been copied"),
        ("rw.short", e.EINTR, "fewer bytes than asked for"),
        ("dup.handle", e.EINVAL, "DUP_HANDLE of a handle of this client"),
        ("dup.read-only", e.EPERM, "no read-write duplicate of a read-only handle"),
        ("dup.unallocated", e.EBADF, "DUP_HANDLE of an allocated handle (else tried as an fd)"),
        ("heaps.carveouts", 0, "GET_AVAILABLE_HEAPS lists carve-outs, not IOVMM"),
        ("heap.unknown", e.ENODEV, "GET_HEAP_SIZE and QUERY_HEAP_PARAMS of a known carve-out"),
        ("dmabuf.mmap-range", e.EINVAL, "offset + length lies inside the dmabuf"),
        ("dmabuf.msync", e.EINVAL, "msync of a dmabuf mapping"),
        ("dmabuf.vpr", e.EPERM, "VPR memory has no CPU view"),
        ("dmabuf.sigbus", 0, "touching a handle that was never ALLOCed: SIGBUS"),
        ("dmabuf.lifetime", 0, "memory goes when fd, CPU map, GPU map and handle are gone"),
        ("dmabuf.ioctl", e.ENOTTY, "a dmabuf fd knows only DMA_BUF_IOCTL_SYNC"),
    ],
    "D: not in a source, chosen strictly": [
        ("map.unallocated", e.EINVAL, "the handle has been ALLOCed"),
        ("setup.oops", e.EFAULT, "bound to a TSG before an address space: nvgpu crashes here"),
        ("unbind.busy", e.EAGAIN, "the hardware still has work of the channel"),
        ("setup.kernel-mode", e.EINVAL, "kernel-mode submission needs what the model lacks"),
    ],
    "K36 K35 K38 profiles": [
        ("profile.open-tsg", e.ENOTTY, "r35's OPEN_TSG has 8 bytes, r36's 24"),
        ("profile.setup-bind", 0, "SETUP_BIND: 80 bytes in r35, 104 from r36"),
        ("profile.subctx", e.EINVAL, "CREATE_SUBCONTEXT does not exist in r35: any VEID binds"),
        ("event.again", e.EINVAL, "r35 has one event fd for each event of a TSG"),
        ("map.direct-kind", e.EINVAL, "r35 maps only with DIRECT_KIND_CTRL"),
        ("profile.sm-record", 0, "the SM error record has 24 bytes, from r38 32"),
        ("profile.read-all-sm", e.ENOTTY, "READ_ALL_SM_ERROR_STATES is in the header only"),
    ],
}  # fmt: skip

RULES: dict[str, Rule] = {
    name: Rule(errno, text, source)
    for source, rules in _TABLE.items()
    for name, errno, text in rules
}
"""Every rule of the model, by name."""
