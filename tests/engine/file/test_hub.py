"""Models by name, by the real huggingface_hub against a hub on loopback."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from tests.engine.file.hub_server import Hub

from orinbench.synth import write_synthetic
from orinllm.errors import BadInput
from orinllm.file.hub import (
    HubName,
    _cached_files,
    _fetch_file,
    _quant_in_name,
    _unchecked_mark_path,
    choose_mmproj_file,
    choose_model_files,
    find_or_fetch_model,
)

NAME = "hf.co/owner/model-GGUF"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("hub") / "model.gguf"
    write_synthetic(path, "tiny", "Q8_0", 0)
    return path.read_bytes()


def orinllm(*arguments: str, home: Path, url: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run("orinllm", *arguments, home=home, url=url, **more)


def run(
    package: str, *arguments: str, home: Path, url: str, **more: str
) -> subprocess.CompletedProcess[str]:
    return run_python("-m", package, *arguments, home=home, url=url, **more)


def run_python(
    *arguments: str, home: Path, url: str, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        **more,
    }
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def one_line(done: subprocess.CompletedProcess[str], says: str) -> None:
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert last.startswith("orinllm: ") and says in last, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("hf.co/a/b", HubName("a/b")),
        ("hf.co/a/b-GGUF:Q6_K", HubName("a/b-GGUF", "Q6_K")),
        ("https://huggingface.co/a/b:IQ4_XS", HubName("a/b", "IQ4_XS")),
        ("models/a.gguf", None),
        ("/srv/hf.co/a", None),
    ],
)
def test_names(text: str, means: HubName | None) -> None:
    assert HubName.parse_unless_path(text) == means
    assert means is None or HubName.parse_unless_path(str(means)) == means


@pytest.mark.parametrize(
    "text", ["hf.co/a", "hf.co/a/b/c", "hf.co//b", "hf.co/a/b:", "hf.co/a/b:\x1b[1m"]
)
def test_half_a_name_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"want hf\.co/OWNER/REPO"):
        HubName.parse_unless_path(text)


FILES = [
    "README.md",
    "mmproj-model-F16.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model-IQ4_XS.gguf",
    "model-Q6_K-00001-of-00002.gguf",
    "model-Q6_K-00002-of-00002.gguf",
    "BF16/model-BF16-00001-of-00003.gguf",
    "BF16/model-BF16-00003-of-00003.gguf",
]


def test_a_type_chooses_its_file_and_all_its_parts() -> None:
    assert choose_model_files(HubName("a/b"), FILES) == ["model-Q4_K_M.gguf"]
    two = ["long-model-Q4_K_M.gguf", "model-Q4_K_M.gguf"]  # the plain one
    assert choose_model_files(HubName("a/b"), two) == ["model-Q4_K_M.gguf"]
    assert choose_model_files(HubName("a/b", "iq4_xs"), FILES) == ["model-IQ4_XS.gguf"]
    assert choose_model_files(HubName("a/b", "Q6_K"), FILES) == [
        "model-Q6_K-00001-of-00002.gguf",
        "model-Q6_K-00002-of-00002.gguf",
    ]
    assert choose_model_files(HubName("a/b"), ["only-Q8_0.gguf", "mmproj.gguf"]) == [
        "only-Q8_0.gguf"
    ]


@pytest.mark.parametrize(
    ("quant", "files", "says"),
    [
        ("Q4_K", FILES, "has no Q4_K; it has"),
        ("Q8_0", ["model-Q4_K_M.gguf"], "has no Q8_0; it has model-Q4_K_M.gguf"),
        (None, ["a-Q8_0.gguf", "a-Q6_K.gguf"], "which is taken unless one is named"),
        ("BF16", FILES, "lacks a part of its model: BF16/model-BF16-00002-of-00003.gguf"),
        ("BF16", FILES[-2:-1], "lacks a part of its model: BF16/model-BF16-00002-of-00003.gguf"),
        ("Q6_K", FILES[5:6], "lacks a part of its model: model-Q6_K-00002-of-00002.gguf"),
        ("BF16", [*FILES[:-1], "BF16/model-BF16-00002-of-00003.gguf"], "BF16-00003-of-00003.gguf"),
        (None, ["mmproj-F16.gguf", "model.safetensors"], "has no GGUF file"),
        (None, ["model-Q4_K_M-00001-of-00000.gguf"], "has no GGUF file"),
        (None, ["\x1b[2Jmodel-Q8_0.gguf"], "has no GGUF file"),  # would reach a terminal
    ],
)
def test_what_a_repository_lacks_is_said(quant: str | None, files: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        choose_model_files(HubName("a/b", quant), files)


@pytest.mark.parametrize(
    ("quant", "files", "chosen"),
    [
        (None, ["mmproj-b-BF16.gguf", "mmproj-b-F16.gguf", "b-Q4_K_M.gguf"], "mmproj-b-F16.gguf"),
        ("Q8_0", ["mmproj-F16.gguf", "mmproj-Q8_0.gguf", "b-Q8_0.gguf"], "mmproj-Q8_0.gguf"),
        ("Q4_K_M", ["b-Q4_K_M.gguf", "b.mmproj-Q8_0.gguf"], "b.mmproj-Q8_0.gguf"),
        (None, ["mmproj-model.gguf"], "mmproj-model.gguf"),
        (None, ["y/mmproj-F16.gguf", "x/mmproj-F16.gguf"], "x/mmproj-F16.gguf"),
    ],
)
def test_a_repository_s_mmproj_is_found(quant: str | None, files: list[str], chosen: str) -> None:
    assert choose_mmproj_file(HubName("a/b", quant), files) == chosen


def test_a_picture_brings_its_mmproj(content: bytes, tmp_path: Path) -> None:
    files = {"model-Q8_0.gguf": content, "mmproj-F16.gguf": b"GGUF, and no more"}
    with Hub({"owner/model-GGUF": files, "owner/blind": {"model-Q8_0.gguf": content}}) as url:
        Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        words = ("-p", "x", "--image", str(tmp_path / "a.png"))
        one_line(orinllm("run", NAME, *words, home=tmp_path, url=url), "mmproj-F16.gguf: ")
        blind = orinllm("run", "hf.co/owner/blind", *words, home=tmp_path, url=url)
        one_line(blind, "hf.co/owner/blind: has no mmproj file")
        named = orinllm("show", NAME, "--mmproj", NAME, home=tmp_path, url=url)
        one_line(named, "mmproj-F16.gguf: ")


def test_a_model_is_fetched_once_listed_and_removed(content: bytes, tmp_path: Path) -> None:
    hub = Hub({"owner/model-GGUF": {"model-Q8_0.gguf": content, "README.md": b"x"}})
    with hub as url:
        done = orinllm("show", NAME, home=tmp_path, url=url)
        assert done.returncode == 0, done.stderr
        assert "architecture  llama" in done.stdout
        assert sum("GET" in line and ".gguf" in line for line in hub.asked) == 1
        hub.asked.clear()
        assert orinllm("show", f"{NAME}:Q8_0", home=tmp_path, url=url).returncode == 0
        assert not [line for line in hub.asked if line.startswith("GET") and ".gguf" in line]
        offline = orinllm("show", NAME, home=tmp_path, url=url, HF_HUB_OFFLINE="1")
        assert offline.returncode == 0, offline.stderr
    gone = orinllm("show", NAME, home=tmp_path, url=url)  # the hub has closed its doors
    assert gone.returncode == 0, gone.stderr
    assert "using the copy that is here" in gone.stderr
    assert f"{NAME}:Q8_0" in orinllm("list", home=tmp_path, url=url).stdout
    one_line(orinllm("rm", f"{NAME}:Q6_K", home=tmp_path, url=url), "is not here; here is")
    assert orinllm("rm", f"{NAME}:Q8_0", home=tmp_path, url=url).returncode == 0
    assert orinllm("list", home=tmp_path, url=url).stdout == ""
    assert not [p for p in tmp_path.rglob("blobs/*") if p.stat().st_size == len(content)]
    one_line(orinllm("show", NAME, home=tmp_path, url=url, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    ("stem", "quant"),
    [("Q8_0/model-F16-Q6_K", "Q6_K"), ("Q4_K_M/part", "Q4_K_M"), ("a-UD-IQ2_XXS", "UD-IQ2_XXS")],
)
def test_the_type_in_a_file_s_name_is_the_last_one(stem: str, quant: str) -> None:
    assert _quant_in_name(stem) == quant


def test_only_the_model_that_is_named_is_removed(content: bytes, tmp_path: Path) -> None:
    """Repositories may keep types in folders, under one file name."""
    files = {"Q8_0/model.gguf": content, "Q6_K/model.gguf": content + bytes(8)}
    with Hub({"owner/model-GGUF": files}) as url:
        for quant in ("Q8_0", "Q6_K"):
            done = orinllm("show", f"{NAME}:{quant}", home=tmp_path, url=url)
            assert done.returncode == 0, done.stderr
        one_line(orinllm("rm", NAME, home=tmp_path, url=url), "names several; here is")
        assert orinllm("rm", f"{NAME}:Q6_K", home=tmp_path, url=url).returncode == 0
        left = orinllm("list", home=tmp_path, url=url).stdout
    assert f"{NAME}:Q8_0" in left and "Q6_K" not in left


@pytest.mark.parametrize("signal", [signal.SIGKILL, signal.SIGINT])
def test_a_check_that_was_interrupted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal: signal.Signals
) -> None:
    """By a process that is killed, as by Ctrl-C: also where the hub does not answer any more."""
    with Hub({"owner/model-GGUF": {"model-Q8_0.gguf": b"x" * 999}}, lies=True) as url:
        program = f"""
import os, sys
from orinllm.file import hub
hub._check_checksum = lambda *given: os.kill(os.getpid(), {int(signal)})
hub.find_or_fetch_model({NAME!r}, print)
"""
        killed = run_python("-c", program, home=tmp_path, url=url)
        assert killed.returncode == -signal or b"KeyboardInterrupt" in killed.stderr.encode()
        assert [p for p in tmp_path.rglob("*.gguf") if p.is_symlink()]
    offline = orinllm("show", NAME, home=tmp_path, url=url, HF_HUB_OFFLINE="1")
    one_line(offline, "SHA-256")
    assert not [p for p in tmp_path.rglob("*.gguf") if p.is_symlink()]


def test_what_was_checked_is_not_checked_again(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, path = tmp_path / ("0" * 64), tmp_path / "model.gguf"
    checks: list[object] = []

    def download(repository: str, file: str) -> str:
        if not path.exists():
            path.symlink_to(blob)
        return str(path)

    def known(repository: str, file: str) -> str | None:
        return str(path) if path.exists() else None

    blob.write_bytes(content)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", known)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr("orinllm.file.hub._check_checksum", lambda *given: checks.append(given))
        for _ in range(3):
            _fetch_file(HubName("a/b"), "model.gguf")
        assert len(checks) == 1
        _unchecked_mark_path(HubName("a/b"), "model.gguf").touch()  # as a killed process leaves it
        _fetch_file(HubName("a/b"), "model.gguf")
    assert len(checks) == 2


def test_the_newest_version_of_a_file_answers_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(when: int) -> SimpleNamespace:
        path = Path(f"/{when}/m-Q8_0.gguf")
        file = SimpleNamespace(file_name=path.name, file_path=path)
        return SimpleNamespace(last_modified=when, snapshot_path=path.parent, files=[file])

    versions = [version(when) for when in (2, 3, 1)]
    cache = SimpleNamespace(repos=[SimpleNamespace(repo_id="a/b", revisions=versions)])
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: cache)
    assert _cached_files(HubName("a/b")) == {"m-Q8_0.gguf": Path("/3/m-Q8_0.gguf")}


def test_the_bench_takes_llama_cpps_option(content: bytes, tmp_path: Path) -> None:
    with Hub({"owner/model-GGUF": {"model-Q8_0.gguf": content}}) as url:
        found = run(
            *("orinbench", "check", "-hf", "owner/model-GGUF", "-n", "2"),
            *("--backend", "tinygrad:CPU"),
            home=tmp_path,
            url=url,
        )
        assert found.returncode == 0 and "model-Q8_0.gguf" in found.stdout, found.stderr
        for flags, says in ((":Q6_K",), "has no Q6_K"), (("", "--offline"), "HF_HUB_OFFLINE"):
            name, *more = flags
            command = ("llama-bench", "-hf", f"owner/model-GGUF{name}", *more)
            wrong = run("orinbench", *command, home=tmp_path / "empty", url=url)
            assert wrong.returncode == 2, wrong.stderr
            assert says in wrong.stderr.splitlines()[-1], wrong.stderr


def test_a_hub_that_breaks_off_is_asked_for_the_rest(content: bytes, tmp_path: Path) -> None:
    whole = content + bytes(30 << 20)  # huggingface_hub writes pieces of 10 MiB
    hub = Hub({"owner/model-GGUF": {"model-Q8_0.gguf": whole}}, cut=25 << 20)
    with hub as url:
        done = orinllm("show", NAME, home=tmp_path, url=url)
        assert done.returncode == 0, done.stderr
        assert hub.ranges and hub.ranges[0] != "bytes=0-"
    with Hub({"owner/model-GGUF": {"model-Q8_0.gguf": content}}, cut=1) as url:
        broken = orinllm("show", NAME, home=tmp_path / "broken", url=url)
        one_line(broken, "the same command goes on")


def test_a_hub_that_lies_is_caught_and_nothing_of_it_stays(content: bytes, tmp_path: Path) -> None:
    files = {"owner/model-GGUF": {"model-Q8_0.gguf": content}}
    with Hub(files, lies=True) as url:
        one_line(orinllm("show", NAME, home=tmp_path, url=url), "SHA-256")
        assert orinllm("list", home=tmp_path, url=url).stdout == ""
    with Hub(files) as url:
        assert orinllm("show", NAME, home=tmp_path, url=url).returncode == 0


ODD = """
import sys
from orinllm.errors import BadInput
from orinllm.file.hub import find_or_fetch_model

for name in sys.argv[1:]:
    try:
        find_or_fetch_model(f"hf.co/{name}", print)
    except BadInput as error:
        print(error)
"""


def test_a_hub_that_leads_out_of_the_cache_or_talks_nonsense(tmp_path: Path) -> None:
    """Each is one line, and nothing is written where the server would have it."""
    out = "../../../../evil"
    lists = {
        "o/html": b"<html>",
        "o/list": b"[]",
        "o/empty": b"{}",
        "o/deep": b"[" * 100_000,
        "o/number": b'{"id": "o/n", "siblings": [{"rfilename": 5}]}',
        "o/texts": b'{"id": "o/t", "siblings": ["a.gguf"]}',
        "o/up": b'{"id": "o/u", "siblings": [{"rfilename": "../../../../evil-Q8_0.gguf"}]}',
        "o/root": b'{"id": "o/r", "siblings": [{"rfilename": "/evil-Q8_0.gguf"}]}',
    }
    headers = {
        "o/etag": {"X-Linked-Etag": f'"{out}"', "ETag": f'"{out}"'},
        "o/weak": {"X-Linked-Etag": f"W/{out}"},
        "o/commit": {"X-Repo-Commit": out},
        "o/large": {"X-Linked-Size": "999999999999999"},
    }
    home = tmp_path / "a" / "home"
    names = [*lists, *headers, "o/no--name"]
    files = {name: {"m-Q8_0.gguf": b"GGUF"} for name in headers}
    with Hub(files, odd=lists, headers=headers) as url:
        done = run_python("-c", ODD, *names, home=home, url=url)
    lines = done.stdout.splitlines()
    assert "Traceback" not in done.stderr and len(lines) == len(names)
    assert lines[names.index("o/commit")].endswith(f"X-Repo-Commit {out}")  # refused here, first
    for name, line in zip(names, lines, strict=True):
        what = "is no model of the hub" if "--" in name else "the hub answers what cannot be used: "
        assert line.startswith(f"hf.co/{name}: {what}")
    assert not list(tmp_path.rglob("*evil*"))


def test_a_hub_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orinllm.file.hub._PATIENCE", 0.2)
    monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda: SimpleNamespace(repos=[]))
    with Hub({"a/b": {}}, pause=5) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        with pytest.raises(BadInput, match=r"^hf.co/a/b: the hub does not answer: ReadTimeout$"):
            find_or_fetch_model("hf.co/a/b", print)


def test_a_hub_that_is_slow_refuses_or_fails_is_one_line(content: bytes, tmp_path: Path) -> None:
    files = {"owner/model-GGUF": {"model-Q8_0.gguf": content}}
    with Hub(files, token="secret") as url:
        one_line(orinllm("show", NAME, home=tmp_path, url=url), "set HF_TOKEN")
        allowed = orinllm("show", NAME, home=tmp_path, url=url, HF_TOKEN="secret")
        assert allowed.returncode == 0, allowed.stderr
    with Hub(files, failing=500) as url:
        one_line(orinllm("show", "hf.co/a/b", home=tmp_path, url=url), "the hub answers 500")
    with Hub(files, pause=4) as url:  # the list of files has no limit, each of six tries a second
        slow = orinllm("show", NAME, home=tmp_path / "x", url=url, HF_HUB_DOWNLOAD_TIMEOUT="1")
        one_line(slow, "does not answer")
    one_line(orinllm("show", "hf.co/a", home=tmp_path, url=url), "want hf.co/OWNER/REPO")
