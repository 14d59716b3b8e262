"""`orinllm run --image`, `/image` in a chat, and `show --mmproj`, as a user types them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tests.engine.vision import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("command")
    tiny.write_text(found / "model.gguf", "idefics3")
    tiny.write_mmproj(found / "mmproj.gguf", "idefics3")
    tiny.write_mmproj(found / "other.gguf", "gemma3")
    for at, picture in enumerate(tiny.pictures("idefics3")):
        Image.fromarray(picture).save(found / f"photo{at}.png")
    return found


def orinllm(
    folder: Path, command: str, *flags: str, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "orinllm.command.cli", command, "model.gguf", "--device", "CPU"]
    return subprocess.run(
        [*line, *flags],
        input=typed,
        cwd=folder,
        env=os.environ | {"HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_picture_of_the_command_line(folder: Path) -> None:
    """The same as /image of a chat says; another picture has other tiles."""
    flags = ("--mmproj", "mmproj.gguf", "-n", "3", "--temperature", "0")
    run = orinllm(folder, "run", *flags, "--image", "photo0.png", "-p", "What?")
    assert run.returncode == 0 and run.stdout.strip(), run.stderr
    (folder / "cut.png").write_bytes((folder / "photo0.png").read_bytes()[:200])
    typed = "/image '~/photo0.png'\n/image none.png\n/image cut.png\n/image\nWhat?\n"
    chat = orinllm(folder, "chat", *flags, typed=typed)
    assert chat.returncode == 0 and "/image none.png: no such file" in chat.stderr
    assert "/image cut.png: the picture is damaged: " in chat.stderr
    assert "/image the name of a picture's file is missing" in chat.stderr
    assert chat.stdout.strip() == run.stdout.strip()

    other = orinllm(folder, "run", *flags, "--image", "photo1.png", "-p", "What?")
    assert other.stdout != run.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--image", "photo0.png"), "--image photo0.png: the model sees with --mmproj FILE"),
        (("--mmproj", "mmproj.gguf", "--image", "none.png"), "--image none.png: no such file"),
        (("--mmproj", "mmproj.gguf", "--image", ""), "--image .: is no regular file; a picture"),
        (
            ("--mmproj", "mmproj.gguf", "--image", "photo0.png", "--image", "model.gguf"),
            "--image model.gguf: it is no picture: PNG, JPEG",
        ),
        (("--mmproj", "model.gguf"), "model.gguf: its architecture is 'llama'; clip was expected"),
        (("--mmproj", "other.gguf"), "other.gguf: a projector gemma3, which is not one of llama"),
        (("--mmproj", "mmproj.gguf", "--path", "general"), "leave --path general out"),
    ],
)
def test_what_cannot_be_seen_is_one_line(folder: Path, flags: tuple[str, ...], said: str) -> None:
    answer = orinllm(folder, "run", *flags, "-p", "What?")
    assert answer.returncode == 2 and not answer.stdout
    last = answer.stderr.strip().splitlines()[-1]
    assert last.startswith("orinllm: ") and said in last


def test_show_says_what_an_encoder_takes(folder: Path) -> None:
    answer = orinllm(folder, "show", "--mmproj", "mmproj.gguf")
    assert answer.returncode == 0
    assert f"mmproj.gguf: idefics3, {tiny.ROWS} rows a tile" in answer.stdout
    assert f"{tiny.SIDE**2} patches of width {tiny.VISION_DIM}" in answer.stdout
