"""Rows of pictures: an encoder's time, and that from a picture to the first text of an answer."""

import base64
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.benchmarks.orinbench_command import Capture, Patch, orinbench
from tests.engine.vision import tiny
from tinygrad import Context
from tinygrad.device import Buffer, Compiler

from orinbench.check.row_result_gate import require_row_passed
from orinbench.errors import CheckFailed
from orinbench.judge.identity import measurement_identity
from orinbench.judge.schema import Record
from orinbench.measure.backends import llama_cpp
from orinbench.measure.backends.backend import BackendError, CaseLeftOutError, LoadRequest
from orinbench.measure.backends.llama_server import FirstTextTime
from orinbench.measure.backends.tinygrad_runner import TinygradRunner
from orinbench.measure.plan import Case, Lane
from orinbench.measure.results import LaneResult, RowResult
from orinbench.pictures import QUESTION, VisionModel

pytestmark = pytest.mark.usefixtures("known_bandwidth")
run = partial(orinbench, "llama-bench")
SEEN = Case(24, 0, 0, picture="168x112")
ASKED = Case(128, 0, 0, text=True, picture="168x112")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    tiny.write_text(folder / "model.gguf", "qwen25vl")
    tiny.write_mmproj(folder / "mmproj.gguf", "qwen25vl")
    return folder


def test_an_encoder_is_timed_and_compared_and_so_is_a_first_text(
    files: Path, monkeypatch: Patch
) -> None:
    for owner, name in ((Compiler, "compile_cached"), (Buffer, "allocate")):  # which a run meters
        monkeypatch.setattr(owner, name, getattr(owner, name))
    with Context(DEV="CPU"):
        runner = TinygradRunner()
        runner.load_to_first_token(
            LoadRequest(str(files / "model.gguf"), 256, mmproj=str(files / "mmproj.gguf"))
        )
        for case in (SEEN, ASKED):
            warm = runner.warm_up(case, check=True)
            assert warm.checked is not None and warm.checked.error < 1e-5
            first, second = (runner.time_repetition(case, 0) for _ in range(2))
            assert first.finite and second.finite and min(first.ns, second.ns) > 100_000
        assert second.extra == {"prompt_tokens": ASKED.n_prompt}
        drawn = {
            runner._vision_model.encoder.prepare_picture(runner._draw_jpeg(SEEN)).ids
            for _ in range(3)
        }
        assert len(drawn) == 3  # each is another one, or its rows would be known
        old = runner._vision_model.encoder
        runner._vision_model.encoder = replace(old, encode=lambda tiles: old.encode(tiles)[::-1])
        found = runner.warm_up(SEEN, check=True)
    lane = LaneResult(Lane("tinygrad:CPU", (SEEN,)), None, [])
    with pytest.raises(CheckFailed, match=r"its rows are .* off the float64 reference, allowed 1"):
        require_row_passed(lane, RowResult(SEEN, found))


def llama(binary: Path, files: Path) -> llama_cpp.LlamaCppBackend:
    lane = Lane("llama.cpp", (SEEN, ASKED), files / "model.gguf", mmproj=files / "mmproj.gguf")
    return llama_cpp.LlamaCppBackend(binary, lane, 20)


def test_an_encoder_of_llama_cpp_says_its_time(fake_llama_bench: Path, files: Path) -> None:
    """As llama-mtmd-cli b1-0c1e570 (0.3.36 of the Python package) talks, and older ones."""
    binary = fake_llama_bench.with_name("llama-mtmd-cli")
    lane = llama(fake_llama_bench, files)
    with pytest.raises(CaseLeftOutError, match="no llama-mtmd-cli"):
        lane.warm_up(SEEN)
    binary.write_text(
        '#!/bin/sh\necho "$@" > "$0.log"\necho an answer\n'
        "echo '0.00.354.481 I mtmd batch encoding done in 22 ms' >&2\n"
        "echo 'image slice encoded in 9 ms' >&2\necho 'image decoded (batch 1/1) in 4 ms' >&2\n"
    )
    binary.chmod(0o755)
    assert lane.time_repetition(SEEN, 3).ns == 31_000_000
    said = (binary.parent / "llama-mtmd-cli.log").read_text()
    assert f"-m {files}/model.gguf --image /" in said and f"--mmproj {files}/mmproj.gguf" in said
    binary.write_text("#!/bin/sh\necho an answer\n")
    with pytest.raises(BackendError, match="says no time"):
        lane.time_repetition(SEEN, 3)


def test_a_first_text_of_llama_server_is_of_a_picture(
    fake_llama_bench: Path, fake_llama_server: Path, files: Path, monkeypatch: Patch
) -> None:
    asked = list[Any]()

    def first_text(
        binary: Path, arguments: list[str], requests: Any, timeout: float
    ) -> FirstTextTime:
        asked.extend((arguments, *requests))
        return FirstTextTime(5, 1.0, 181, 2)

    monkeypatch.setattr(llama_cpp, "time_first_text", first_text)
    sample = llama(fake_llama_bench, files).time_repetition(ASKED, 3)
    assert (sample.ns, sample.extra["prompt_tokens"]) == (5, 181)
    arguments, warm, timed = asked
    assert arguments[2:4] == ["--mmproj", str(files / "mmproj.gguf")]
    pixels = []
    for path, body in (warm, timed):
        picture, text = body["messages"][0]["content"]
        assert path == "/v1/chat/completions" and body["max_tokens"] == 1
        assert text["text"] == QUESTION and not body["cache_prompt"]
        data = base64.b64decode(picture["image_url"]["url"].partition(",")[2])
        pixels.append(np.asarray(Image.open(io.BytesIO(data))))
    assert pixels[0].shape == (112, 168, 3) and (pixels[0] != pixels[1]).any()


def test_the_rows_of_a_run(fake_llama_bench: Path, files: Path, capsys: Capture) -> None:
    """A case without a program of this llama.cpp is left out, and no failure."""
    model = ("-m", str(files / "model.gguf"), "--backend", "llama.cpp", "--no-check")
    more = ("--llama-bench", str(fake_llama_bench), "-p", "0", "-n", "0", "--ttft", "0", "-r", "1")
    mmproj = ("--mmproj", str(files / "mmproj.gguf"))
    assert run(*model, *more, *mmproj, "--picture", "168x112,300x200", "-o", "json") == 0
    records = json.loads(capsys.readouterr().out)
    tests = ["img168x112", "ttft img168x112", "img300x200", "ttft img300x200"]
    assert [record["test"] for record in records] == tests
    assert [record["n_prompt"] for record in records] == [24, 128, 28, 132]
    name = VisionModel.read(files / "model.gguf", files / "mmproj.gguf").projector_label
    assert [record["mmproj"] for record in records] == [name] * 4
    assert name.startswith("qwen2.5vl_merger F16 ")
    assert "no llama-mtmd-cli" in records[0]["extra"]["left_out"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--picture 640x480", "--picture 640x480: the model sees with --mmproj FILE"),
        ("--mmproj mmproj.gguf --picture 9", "--picture 9: no size"),
        ("--mmproj mmproj.gguf --picture 2000x2", "--mmproj: the picture has 2000 x 2 pixels"),
        ("--mmproj model.gguf", "--mmproj: model.gguf: its architecture is 'qwen2vl'"),
        ("--mmproj mmproj.gguf --path general", "the engine sees, not tinygrad.llm"),
    ],
)
def test_what_cannot_be_seen_is_one_line(
    files: Path, fake_llama_bench: Path, flags: str, said: str, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(files)
    backend = ("--backend", "llama.cpp", "--llama-bench", str(fake_llama_bench))
    assert run("-m", "model.gguf", *backend, *flags.split()) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_an_encoder_is_part_of_what_is_measured() -> None:
    """And records of before have the identity that their history knows."""
    plain, seen = Record(test="pp8"), Record(test="pp8", mmproj="gemma3 F16 9")
    assert "mmproj" not in measurement_identity(plain)
    assert (
        len(
            {
                measurement_identity(plain),
                measurement_identity(seen),
                measurement_identity(Record(test="pp8", mmproj="x")),
            }
        )
        == 3
    )
