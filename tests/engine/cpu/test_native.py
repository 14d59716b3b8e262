"""The CPU's machine code: kept whole or made again, and threads that run it in turns."""

import threading
from pathlib import Path

import pytest

from orinllm.cpu import native as module
from orinllm.cpu.native import compute_thread_count, load_native_code
from orinllm.errors import BadInput


def test_code_that_was_kept_is_whole_or_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_native_code()  # which keeps it for the other tests
    made: list[str] = []

    def compile_(self: object, source: str) -> bytes:
        made.append(source)
        return b"\xc3" * 64  # x86: return

    monkeypatch.setattr("tinygrad.runtime.support.compiler_cpu.ClangJITCompiler.compile", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CACHEDB", raising=False)
    fresh = load_native_code.__wrapped__
    fresh()
    fresh()
    assert len(made) == 1
    (kept,) = (tmp_path / "tinygrad-orin" / "cpu").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    fresh()
    assert len(made) == 2
    monkeypatch.setattr(module, "_cpu_description", lambda: "another processor")
    fresh()
    assert len(made) == 3
    monkeypatch.setenv("CACHEDB", str(tmp_path / "cold" / "cache.db"))  # a cold start
    fresh()
    assert len(made) == 4


def test_an_interrupted_run_ends_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    program, under_way, most, cores = module.NativeCode(b"\xc3" * 64), [0], [0], set[int]()
    gate, lock = threading.Event(), threading.Lock()

    def call(state: int, core: int) -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            cores.add(core)
        if state == 1 and core == 0:
            with lock:
                under_way[0] -= 1
            gate.set()
            raise KeyboardInterrupt
        gate.wait(60)
        with lock:
            under_way[0] -= 1

    monkeypatch.setattr(program, "_call", call)
    with pytest.raises(KeyboardInterrupt):
        program.run_operations(1, 3)
    assert under_way == [0] and cores == {0, 1, 2}
    threads = [threading.Thread(target=program.run_operations, args=(2, 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert under_way == [0] and most[0] <= 3


@pytest.mark.parametrize("asked", ["0", "two", "-1"])
def test_cores_that_are_no_number(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("CPU_COUNT", asked)
    with pytest.raises(BadInput, match=f"^CPU_COUNT={asked}: a number of threads"):
        compute_thread_count()


@pytest.mark.parametrize(
    ("name", "opens"),
    [("nvidiactl", True), ("null", False), ("2-1/idVendor", True), ("2-1/idProduct", False)],
)
def test_a_gpu_that_shows_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, opens: bool
) -> None:
    from orinllm.gpu import device

    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("add1\n")  # what tinygrad's AMD device looks for by USB
    nodes = tuple((str(tmp_path), pattern) for _, pattern in device._NODES)
    monkeypatch.setattr(device, "_NODES", nodes[:6])
    vendors = tuple((str(tmp_path), *rest) for _, *rest in device._VENDORS)
    monkeypatch.setattr(device, "_VENDORS", vendors)
    for variable in (*device._ASKED, "DEV"):
        monkeypatch.delenv(variable, raising=False)
    assert device.gpu_may_open() == opens
    assert device._cpu_name_if_wanted(None) == (None if opens else "CPU")
    assert device._cpu_name_if_wanted("cpu") == "CPU" and device._cpu_name_if_wanted("NV") is None
