"""Load on a server whose delays are known: the client's figures are the server's."""

import asyncio
import base64
import io
import json
import signal
import socket
import stat
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import uvicorn
from PIL import Image
from tests.benchmarks.interrupted import interrupted
from tests.benchmarks.orinbench_command import Capture, Patch, orinbench
from tests.benchmarks.serve import fake_openai
from tests.benchmarks.serve.fake_openai import FakeOpenAI
from tests.engine.vision import tiny

from orinbench.errors import BenchError
from orinbench.interrupts import SIGNALS, Interrupts
from orinbench.pictures import RandomPictures
from orinbench.progress import Progress
from orinbench.serve.client import AnswerTimes, Client, Prompt
from orinbench.serve.load import Load, LoadResult, arrival_times, ask_all
from orinbench.serve.load_statistics import parse_goals, statistics_of_load
from orinbench.serve.output import render_json, render_md
from orinbench.serve.run import LoadPlan, Server, ServeResults
from orinbench.serve.run import run_rounds as run_plan
from orinbench.serve.servers import ServerCapacity, server_argv

run = partial(orinbench, "serve-bench")
FIRST_S, GAP_S = 0.05, 0.02
Served = tuple[FakeOpenAI, str]


@pytest.fixture
def server() -> Iterator[Served]:
    """A running server in a thread, and its address."""
    fake = FakeOpenAI(FIRST_S, GAP_S)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host = uvicorn.Server(uvicorn.Config(fake.app, log_level="error"))
        thread = threading.Thread(target=host.run, kwargs={"sockets": [listener]})
        thread.start()
        while not host.started:
            time.sleep(0.01)
        yield fake, f"http://127.0.0.1:{listener.getsockname()[1]}"
        host.should_exit = True
        thread.join()


def stretch(*answers: AnswerTimes, seconds: float = 2.0) -> LoadResult:
    return LoadResult(list(answers), seconds, 0.1)


def test_figures_of_known_answers() -> None:
    def answer(ttft: float, gaps: list[float], tokens: int) -> AnswerTimes:
        first = 10.0 + ttft
        return AnswerTimes(10.0, first, first + sum(gaps), gaps, 100, 40, tokens)

    found = statistics_of_load(
        [
            stretch(answer(0.1, [0.02, 0.03], 3), answer(0.3, [0.04], 3)),
            stretch(
                answer(0.2, [], 1), AnswerTimes(1.0, 9.0, 9.0, [5.0], error="status 429: full")
            ),
        ],
        {"ttft": 250, "tpot": 30},
    )
    assert (found.requests, found.failed, found.errors) == (4, 1, {"status 429: full": 1})
    assert (found.seconds, found.prompt_tokens, found.cached_tokens) == (4.0, 300, 120)
    assert (found.output_tokens, found.output_tokens_s) == (7, 7 / 4)
    assert (found.requests_s, found.total_tokens_s) == (3 / 4, 307 / 4)
    assert found.ttft_ms["p50"] == pytest.approx(200)
    assert found.ttft_ms["p90"] == pytest.approx(280)  # as numpy's and vllm's percentiles
    assert found.itl_ms["mean"] == pytest.approx(30) and found.itl_ms["p50"] == pytest.approx(30)
    # (20 + 30) / 2 and 40 / 2; the answer of one token has none.
    assert found.tpot_ms["mean"] == pytest.approx((25 + 20) / 2)
    assert found.e2e_ms["p99"] == pytest.approx(200 + 0.98 * 140)
    assert found.goodput_s == 2 / 4  # the second is late
    nothing = statistics_of_load([stretch(AnswerTimes(1.0, error="x"))], {})
    assert nothing.ttft_ms == {} and nothing.goodput_s is None and nothing.output_tokens_s == 0


def test_closed_loop_figures_are_what_the_server_did(server: Served, capsys: Capture) -> None:
    fake, url = server
    arguments = ["--url", url, "--concurrency", "3", "--requests", "7", "-p", "20", "-n", "5"]
    assert run(*arguments, "-r", "2", "-o", "json", "--goodput", "e2el:60000") == 0
    found = json.loads(capsys.readouterr().out)
    (result,) = found["results"]
    figures = result["figures"]
    timed = [seen for seen in fake.seen if seen.body["max_tokens"] == 5 and len(seen.sent) == 5]
    # Before each round's load three go untimed, with as many tokens, since five are few.
    assert len(timed) == 2 * (7 + 3) and figures["requests"] == 14 and figures["failed"] == 0
    assert fake.most == 3
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (14 * 5, 14 * 20)
    assert len({seen.body["prompt"] for seen in fake.seen}) == len(fake.seen)
    assert timed[0].body["ignore_eos"] and timed[0].body["stream_options"] == {
        "include_usage": True
    }
    assert len(result["rounds"]) == 2
    assert figures["goodput_s"] == pytest.approx(figures["requests_s"])
    # The client's times of a request lag the server's by the way there and back.
    by_server = sorted(timed, key=lambda seen: seen.came)
    by_server = [s for i in (0, 1) for s in by_server[10 * i + 3 : 10 * i + 10]]
    answers = [a for r in result["rounds"] for a in r["answers"]]
    # Requests that come together may be in another order here and there: ranks are compared.
    for ours, theirs in (
        ((seen.came for seen in by_server), (answer["due"] for answer in answers)),
        ((answer["first"] for answer in answers), (seen.sent[0] for seen in by_server)),
        ((answer["last"] for answer in answers), (seen.sent[-1] for seen in by_server)),
    ):
        assert all(late >= soon for late, soon in zip(sorted(ours), sorted(theirs), strict=True))
    for answer in answers:
        assert sum(answer["gaps_s"]) == pytest.approx(answer["last"] - answer["first"])
    for seen in by_server:
        gaps = [later - earlier for earlier, later in pairwise(seen.sent)]
        assert statistics.mean(gaps) > GAP_S * 0.9
    server_ttft = statistics.median(seen.sent[0] - seen.came for seen in by_server)
    assert figures["ttft_ms"]["p50"] >= 1e3 * FIRST_S
    assert figures["ttft_ms"]["p50"] / 1e3 - server_ttft < 1.0
    assert figures["e2e_ms"]["p50"] >= 1e3 * (FIRST_S + 4 * GAP_S * 0.9)


def test_an_open_loop_does_not_wait_for_answers(server: Served, capsys: Capture) -> None:
    fake, url = server
    fake.first_s = 0.5
    arguments = ["--url", url, "--rate", "40", "--requests", "12", "-p", "4", "-n", "2", "-r", "1"]
    assert run(*arguments, "--endpoint", "chat") == 0
    out = capsys.readouterr().out
    assert fake.most >= 4  # twelve arrive in 0.3 s, and each takes half a second
    assert "40/s" in out and "first text (TTFT)" in out and "on average 4 tokens of prompt" in out
    assert "messages" in fake.seen[0].body


def test_a_late_client_counts_and_what_follows_the_text_does_not() -> None:
    """The first request holds up the client while the second is due, and its connection after."""

    async def ask(prompt: Prompt, due: float) -> AnswerTimes:
        if prompt.text == "0":
            time.sleep(0.1)
        answer = AnswerTimes(due, prompt_tokens=1, output_tokens=1)
        answer.record_text_time(time.perf_counter())
        await asyncio.sleep(0.5)
        return answer

    prompts = [Prompt(str(i), 1) for i in range(2)]
    found = asyncio.run(ask_all(Load(rate=1000.0), prompts, ask, 0))
    assert found.answers[1].ttft_s > 0.08
    last = max(answer.last or 0 for answer in found.answers)
    assert 0.1 <= found.seconds <= last - found.answers[0].due + 0.01


def plan_of(load: Load) -> LoadPlan:
    return LoadPlan((load,), 7, 1, 8, str, "completions", "m", {}, 1.0, 0, {})


def test_verdicts_are_of_all_measures_at_once() -> None:
    """Seven rounds are enough for three measures, six are not, however clear each of them is."""
    servers = tuple(Server(name, nullcontext, fresh=True) for name in ("a", "b"))  # type: ignore[arg-type]
    load = Load(1)
    plan = plan_of(load)
    for rounds, says in ((6, "too few rounds for a verdict (-r 7 or more)"), (7, "b is better")):
        results = ServeResults(plan, servers)
        for name, slow in (("a", 2.0), ("b", 1.0)):
            results.stretches[name, load] = {
                i: stretch(AnswerTimes(0.0, slow + i / 9, slow * 3, [slow], 1, 0, 3), seconds=slow)
                for i in range(rounds)
            }
        compared = render_md(results).partition("\n- ")[2]
        for measure in ("output tokens a second", "time to first text, p50", "gap between texts"):
            (line,) = (line for line in compared.splitlines() if measure in line)
            assert says in line
        found = json.loads(render_json(results))["comparisons"]
        assert {each["verdict"] == "faster" for each in found} == {rounds == 7}
        assert all((each["server"], each["n"]) == ("b", rounds) for each in found)
    assert "of a core" not in compared and "Interrupted" not in compared
    results.partial = True
    assert "Interrupted: the figures are those measured until then." in render_md(results)
    results.stretches["a", load] = {
        0: LoadResult([AnswerTimes(0.0, error="x")], 1.0, cpu_share=0.9)
    }
    assert "a, 1 at once: the client took 90 % of a core" in render_md(results)


def test_servers_take_turns_in_an_order_that_is_drawn(monkeypatch: Patch) -> None:
    seen: list[str] = []

    async def measure(results: ServeResults, server: Server, *_: object) -> None:
        seen.append(server.name)

    monkeypatch.setattr("orinbench.serve.run._measure_loads", measure)
    servers = tuple(Server(name, nullcontext) for name in "ab")  # type: ignore[arg-type]
    run_plan(plan_of(Load(1)), servers, Progress(), Interrupts())
    rounds = {tuple(seen[i : i + 2]) for i in range(0, 14, 2)}
    assert len(seen) == 14 and rounds == {("a", "b"), ("b", "a")}


def test_arrivals_have_their_rate_and_burstiness() -> None:
    for burstiness, deviation in ((1.0, 1.0), (4.0, 0.5), (0.25, 2.0)):
        times = arrival_times(20_001, 5.0, burstiness, 3)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert times[0] == 0.0
        assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
        assert statistics.stdev(gaps) * 5 == pytest.approx(deviation, rel=0.05)
    assert (
        arrival_times(5, 5.0, 1.0, 3)
        == arrival_times(5, 5.0, 1.0, 3)
        != arrival_times(5, 5.0, 1.0, 4)
    )


WORD = b'data: {"choices": [{"text": "w"}]}'
USAGE = b'data: {"usage": {"prompt_tokens": 9, "completion_tokens": 2}}'


def asked(*lines: bytes) -> AnswerTimes:
    """The answer of at most 4 tokens that a client makes of a stream."""

    async def ask() -> AnswerTimes:
        body = b"".join(line + b"\n\n" for line in lines)
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
        async with httpx.AsyncClient(transport=transport) as client:
            return await Client(client, "http://h", "m", "completions", 9.0).ask(Prompt("p", 4), 0)

    return asyncio.run(ask())


def usage(completion: object, known: object = 0) -> bytes:
    details = {"cached_tokens": known}
    found = {"prompt_tokens": 9, "completion_tokens": completion, "prompt_tokens_details": details}
    return b"data: " + json.dumps({"choices": [], "usage": found}).encode()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([WORD, b'data: {"error": {"message": "out of pages"}}'], "in the stream: out of pages"),
        ([WORD], "the answer has no usage, so its tokens are not known"),
        ([USAGE], "the answer has no text"),
        ([b"data: 5"], "not OpenAI's stream: an event is '5', and no object"),
        ([b"data: " + b"[" * 100_000], "not OpenAI's stream: maximum recursion depth"),
        ([b'data: {"choices": 3}'], "not OpenAI's stream: choices is no list"),
        ([b'data: {"choices": [3]}'], "not OpenAI's stream: a choice, or its delta, is no object"),
        ([b'data: {"choices": [{"delta": 3}]}'], "not OpenAI's stream: a choice, or its delta"),
        ([WORD, b'data: {"usage": [3]}'], "not OpenAI's stream: usage: it is '[3]'; want an obj"),
        ([WORD, usage(None)], "not OpenAI's stream: usage: completion_tokens is 'None'; want a"),
        ([WORD, usage(2, "x")], "not OpenAI's stream: usage: prompt_tokens_details: cached_tok"),
        ([WORD, usage(5)], "the usage counts 5 tokens of an answer that has 1 to 4"),
        ([WORD, usage(0)], "the usage counts 0 tokens of an answer that has 1 to 4"),
        ([WORD, usage(4, 10)], "the usage counts 10 tokens known of a prompt of 9"),
    ],
)
def test_a_stream_that_is_none_is_a_failed_answer(lines: list[bytes], says: str) -> None:
    assert (asked(*lines).error or "").startswith(says)


def test_a_stream_may_hold_what_json_and_openai_allow() -> None:
    """Letters that end a line for str.splitlines, an error that is null, no [DONE]."""
    word = 'data: {"error": null, "choices": [{"text": "a\u2028\u0085b"}]}'.encode()
    found = asked(word, b": still there", WORD + b"\r", usage(4, 9))
    assert (found.error, found.output_tokens, found.prompt_tokens) == (None, 4, 9)
    assert found.cached_tokens == 9 and len(found.gaps_s) == 1
    assert asked(WORD, USAGE, b"data: [DONE]", b"data: 5").error is None


def test_failures_are_counted_and_said(server: Served, monkeypatch: Patch, capsys: Capture) -> None:
    fake, url = server
    fake.first_s = 30.0
    words = ["--url", url, "--concurrency", "4", "--requests", "4", "-n", "1", "-r", "1"]
    assert run(*words, "--timeout", "1") == 1
    assert "4 failed: not complete after 1 s (--timeout)." in capsys.readouterr().out
    monkeypatch.setattr("orinbench.serve.command.random_words_text", lambda n, seed: "teapot")
    assert run(*words) == 1
    assert "4 failed: status 429: the queue is full." in capsys.readouterr().out


def test_a_server_that_goes_leaves_the_rounds_before(
    server: Served, monkeypatch: Patch, capsys: Capture
) -> None:
    fake, url = server
    fake.first_s = fake.gap_s = 0.0
    names = iter(["m", "m"])

    def served(address: str, headers: dict[str, str]) -> str:
        if (name := next(names, None)) is None:
            raise BenchError(f"{address}: gone.")
        return name

    monkeypatch.setattr("orinbench.serve.run.first_served_model", served)
    words = ["--url", url, "--concurrency", "1", "--requests", "2", "-n", "1", "-o", "json"]
    assert run(*words, "-r", "9") == 2
    captured = capsys.readouterr()
    assert captured.err.endswith(f"orinbench: {url}: gone.\n")
    found = json.loads(captured.out)
    assert (found["partial"], found["fault"]) == (True, f"{url}: gone.")
    assert len(found["results"][0]["rounds"]) == 2


@pytest.mark.parametrize("number", SIGNALS)
def test_interrupts_print_what_was_measured(server: Served, number: signal.Signals) -> None:
    """Several of them, as `timeout` and a person in a hurry send; the rounds before are kept."""
    fake, url = server
    fake.first_s = fake.gap_s = 0.0
    words = ["--url", url, "--concurrency", "1,2", "--requests", "2", "-n", "2", "-o", "json"]
    command = [sys.executable, "-m", "orinbench", "serve-bench", *words, "-r", "100000"]
    code, out, err = interrupted(command, "round 41 of", number)
    assert code == 130 and "Traceback" not in err
    found = json.loads(out)
    assert found["partial"]
    assert [len(each["rounds"]) >= 40 for each in found["results"]] == [True, True]


def test_an_interrupt_cancels_what_is_measured(monkeypatch: Patch) -> None:
    """Raised in the middle of a task, it left others waiting that closing the loop waited for."""
    seen: list[str] = []

    async def measure(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        except BaseException as error:
            await asyncio.sleep(0)  # what a connection does to end
            seen.append(type(error).__name__)
            raise

    monkeypatch.setattr("orinbench.serve.run._measure_loads", measure)
    monkeypatch.setattr("orinbench.serve.run.first_served_model", lambda *_: "m")
    servers = (Server("a", nullcontext),)  # type: ignore[arg-type]
    with Interrupts() as interrupts:
        assert run_plan(plan_of(Load(1)), servers, Progress(), interrupts).partial
    assert seen == ["CancelledError"]


@pytest.fixture
def fake_server_binary(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A llama-server on PATH that is the fake."""
    script = tmp_path / "llama-server"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{fake_openai.__file__}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return script


def test_servers_are_started_in_turns_and_compared(
    server: Served, fake_server_binary: Path, tiny_path: Path, capsys: Capture
) -> None:
    fake, url = server
    fake.first_s = 0.2  # ten times the other's
    arguments = ["--url", url, "--start", "llama-server", "-m", str(tiny_path), "-p", "16"]
    arguments += ["-n", "2", "--concurrency", "4", "--requests", "4"]
    assert run(*arguments, "-r", "2") == 0
    captured = capsys.readouterr()
    assert "llama-server" in captured.out and url in captured.out
    assert "4 at once, time to first text, p50: too few rounds for a verdict" in captured.out
    assert "times as good as llama-server (2 rounds)" in captured.out
    assert "A server of --url is one process in all rounds" in captured.out
    assert "llama-server: round 2 of 2: 4 at once" in captured.err
    flags = ["--llama-server-flags", "--dies now"]
    assert run(*arguments, "-r", "1", *flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "orinbench: llama-server: ended with status 1: error: now"


def test_what_is_started_holds_the_load(fake_server_binary: Path) -> None:
    room = ServerCapacity(Path("m.gguf"), slots=8, tokens=640, queue=32)
    where = "--host 127.0.0.1 --port 81"
    ours = " ".join(server_argv("orinllm", room, 81, "--deterministic"))
    assert ours.endswith(f"serve m.gguf -c 704 --queue 32 {where} --deterministic")
    theirs = " ".join(server_argv("llama-server", room, 81, "-ngl 99"))
    assert theirs.endswith(f"-m m.gguf -c 5632 -np 8 {where} -ngl 99")
    with pytest.raises(BenchError, match="--orinllm-flags '-x: no closing quotation"):
        server_argv("orinllm", room, 81, "'-x")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--url or --start: no server; give --url URL, or --start with -m FILE"),
        (["--url", "localhost:8000"], "--url 'localhost:8000': no address; right is http://127"),
        (["--url", "http://[::1"], "--url 'http://[::1': no address"),
        (["--url", "http://h:99999"], "--url 'http://h:99999': no address"),
        (["--url", "http://h/?key=x"], "--url 'http://h/?key=x': no address"),
        (["--start", "vllm", "-m", "/nowhere"], "/nowhere: "),
        (["--start", "orinllm"], "--start orinllm: serves a file; name it with -m FILE"),
        (["--url", "http://h", "--rate", "1,x"], "--rate 1,x: 'x' is no number of requests"),
        (["--url", "http://h", "--concurrency", "0"], "--concurrency 0: 0 is too small"),
        (["--url", "http://h", "--goodput", "ttfb:3"], "--goodput ttfb:3: 'ttfb:3' is no limit"),
        (["--url", "http://h", "--goodput", "ttft:x"], "--goodput ttft:x: 'ttft:x' is no limit"),
        (["--url", "http://h", "--goodput", "tpot:3,tpot:4"], "--goodput tpot:3,tpot:4: tpot has"),
        (["--url", "http://h", "--picture", "9x9"], "--picture 9x9: is of chats; give --endpoint"),
        (["--url", "http://h", "--mmproj", "m"], "--mmproj m: is of --picture, which is not given"),
        (
            ["--url", "http://h", "--endpoint", "chat", "--picture", "99999x99999"],
            "--picture 99999x99999: no size; WIDTHxHEIGHT was expected, as 640x480, of 50,000,000",
        ),
        (
            ["--start", "orinllm", "--endpoint", "chat", "--picture", "9x9"],
            "--start orinllm: sees with --mmproj FILE, which is not given",
        ),
        (["--url", "http://h", "--burstiness", "2"], "--burstiness 2: is of --rate, which is not"),
        (["--url", "http://h", "--orinllm-flags", "-x"], "--orinllm-flags -x: are for --start"),
        (["--url", "http://h", "--api-key-file", "/nowhere"], "--api-key-file /nowhere: cannot"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: Capture, arguments: list[str], says: str
) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"orinbench: {says}")


def test_an_unknown_server_and_a_wrong_key(
    server: Served, tiny_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert run("--start", "vllm", "-m", str(tiny_path)) == 2
    assert "--start vllm: unknown; there are orinllm, llama-server" in capsys.readouterr().err
    (tmp_path / "key").write_text("wrong\n")
    assert run("--url", server[1], "--api-key-file", str(tmp_path / "key")) == 2
    assert "answers 401; see --api-key-file" in capsys.readouterr().err
    with pytest.raises(BenchError, match="'tpot:inf' is no limit"):
        parse_goals("tpot:inf")
    assert Load(4).label == "4 at once" and Load(rate=2.5).label == "2.5/s"


def test_each_request_has_another_picture(server: Served, tmp_path: Path) -> None:
    fake, url = server
    asked = ("--url", url, "--endpoint", "chat", "--picture", "60x45")
    assert run(*asked, "--concurrency", "2", "--requests", "3", "-r", "1", "-n", "2") == 0
    shown = set()
    for seen in fake.seen:
        image, text = seen.body["messages"][0]["content"]
        assert text["type"] == "text" and text["text"]
        kind, data = image["image_url"]["url"].split(",")
        assert kind == "data:image/jpeg;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (60, 45)
        shown.add(data)
    assert len(shown) == len(fake.seen) == 5  # two of them to warm up
    tiny.write_mmproj(tmp_path / "mmproj.gguf", "gemma3")
    assert RandomPictures.parse("60x45", 0).token_count(tmp_path / "mmproj.gguf") == tiny.ROWS + 32
