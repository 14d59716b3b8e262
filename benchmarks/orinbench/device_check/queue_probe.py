"""Queue behaviour that only hardware decides.

Whether a full ring of submits costs throughput, and whether the GPU writes into a QMD after it has
released its signal.
"""

import time

from orinbench.device_check.gpu import (
    ONE_THREAD,
    SPIN_SOURCE,
    Found,
    Work,
    buffers,
    device,
    program,
    seconds_of,
)

# A QMD of version 3 (Ampere): cla6c0qmd.h and the 256-byte slots of SEND_PCAS.
QMD_BYTES = 256


def ring(times_over: float, long_kernels: bool) -> Found:
    """Time launches, in microseconds of each: as many as half the ring holds, and several rings.

    A kernel takes the GPU several times longer than a launch takes the host (`host_us`), so that
    the ring fills; `full` counts the launches that found it so.
    """
    gpu, work, (out,) = device(), program(SPIN_SOURCE, "spin"), buffers(4096)
    fifo, loops, full = gpu.compute_gpfifo, 1, 0

    def launch(launches: int) -> None:
        nonlocal full
        for _ in range(launches):
            full += fifo.gpget[0] == (fifo.put_value + 1) % fifo.entries_count
            work(out, **ONE_THREAD, vals=(loops,))

    def each_us(launches: int) -> float:
        return 1e6 * seconds_of(lambda: launch(launches)) / launches

    each_us(8)
    begun = time.perf_counter()
    launch(64)
    host_us = 1e6 * (time.perf_counter() - begun) / 64
    while long_kernels and each_us(16) < 6 * host_us and loops < 1 << 24:
        loops *= 2
    half_us, full = each_us(fifo.entries_count // 2), 0
    over_us = each_us(int(fifo.entries_count * times_over))
    found = {"entries": fifo.entries_count, "full": full, "host_us": host_us}
    return {**found, "half_us": half_us, "over_us": over_us, "ratio": over_us / half_us}


def qmd(times: int) -> Found:
    """Launch with the release in the QMD, and clear the QMD when the release is seen.

    What is in it afterwards has been written by the GPU behind its release; `written` counts the
    QMDs that the GPU had changed until then.
    """
    gpu, work, (out,) = device(), program(SPIN_SOURCE, "spin"), buffers(4096)
    done, written, late = gpu.new_signal(value=0), 0, 0
    for turn in range(1, times + 1):
        queue = gpu.hw_compute_queue_t().wait(gpu.timeline_signal, gpu.timeline_value - 1)
        arguments = work.fill_kernargs((out,), (turn,))
        queue.memory_barrier().exec(work, arguments, (1, 1, 1), (1, 1, 1))
        view = queue.active_qmd_buf.cpu_view()
        queue.qmd_release = True
        queue.signal(done, turn)
        queue.qmd_release = False
        queue.signal(gpu.timeline_signal, gpu.next_timeline())
        given = bytes(view[:QMD_BYTES])
        queue.submit(gpu)
        done.wait(turn)
        written += bytes(view[:QMD_BYTES]) != given
        view[:QMD_BYTES] = bytes(QMD_BYTES)
        gpu.synchronize()
        time.sleep(0.002)
        late += any(view[:QMD_BYTES])
    return {"launches": times, "written": written, "written_after_release": late}


def queue(work: Work) -> Found:
    """Both answers."""
    sizes = work.sizes
    return {"ring": ring(sizes.ring_over, sizes.long_kernels), "qmd": qmd(sizes.qmds)}


PROGRAMS = (queue,)
