"""Many clients, rude clients, and clients that may not ask; a toy answers."""

import http.client
import json
import random
import re
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from tests.engine.server.live import Live, client, live, wait_until
from tests.engine.server.many_requests import states
from tests.engine.server.toy import ToyRunner, description, toy, toy_logits

from orinllm.batching.sequence import ScheduledSequence
from orinllm.choose.sampling import DrawRequest, Sampling, sample_masked_token
from orinllm.server.fields import MOST_BYTES
from orinllm.server.web.connection import LimitedConnection

PAGE = "https://page.example"
ASK: Any = {"model": "test", "messages": [{"role": "user", "content": "Hello"}]}


def complete(server: Live, prompt: list[int], **fields: Any) -> str:
    given: Any = {"model": "test", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    return str(httpx.post(f"{server.url}/v1/completions", json=given, timeout=120).json())


def runner(server: Live) -> ToyRunner:
    found = server.engine.scheduler.runner
    assert isinstance(found, ToyRunner)
    return found


def connect(server: Live) -> socket.socket:
    where = urlsplit(server.url)
    return socket.create_connection((where.hostname, where.port), timeout=30)


def post(server: Live, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """Return a request as it goes over the wire."""
    lines = {
        "Host": urlsplit(server.url).netloc,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@pytest.mark.parametrize("clients", [8, 128])
def test_each_of_many_gets_what_it_gets_alone(clients: int) -> None:
    """Prompts that share beginnings, greedy and seeded, in fewer slots than clients."""
    vocabulary = description().network.config.vocab_size
    shared = random.Random(0).choices(range(300, 9000), k=140)

    def request(i: int) -> tuple[list[int], Sampling]:
        own = random.Random(i).choices(range(300, 9000), k=5 + i % 90)
        greedy = Sampling(temperature=0)
        wild = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=i)
        return [*shared, *own] if i % 2 else own, wild if i % 3 else greedy

    def ask(i: int) -> list[str]:
        prompt, how = request(i)
        given = {"temperature": how.temperature, "seed": how.seed, "stream": i % 4 == 0}
        more: Any = {"model": "test", "prompt": prompt, "max_tokens": 16, "logprobs": 0, **given}
        answer: Any = server.client().completions.create(**more)
        chunks = list(answer) if given["stream"] else [answer]
        texts = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
        return texts

    with live(toy(slots=16, pages=200, queue=128)) as server, ThreadPoolExecutor(clients) as pool:
        scheduler = server.engine.scheduler

        def meet() -> None:
            """Let the first step take as long as all need to arrive."""
            runner(server).pace = lambda: None
            wait_until(lambda: scheduler.n_running + scheduler.n_waiting == clients, "all clients")

        runner(server).pace = meet
        answers = list(pool.map(ask, range(clients)))
        assert runner(server).widest > min(clients, 16) // 2
    words = description().tokenizer
    for i in range(0, clients, max(1, clients // 16)):
        prompt, how = request(i)
        tokens = alone_of(prompt, how, vocabulary)
        assert answers[i] == [words.token_bytes(t).decode(errors="replace") for t in tokens]


def alone_of(prompt: list[int], how: Sampling, vocabulary: int) -> list[int]:
    ids = list(prompt)
    for _ in range(16):
        ids.append(sample_masked_token(toy_logits(ids, vocabulary), DrawRequest(how, ids)).token)
    return ids[len(prompt) :]


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_frees_the_slot_within_a_step(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({**ASK, "stream": stream, "max_tokens": 1500, "ignore_eos": True}).encode()
    with live(toy(slots=1, step_seconds=0.05)) as server:
        with closing(connect(server)) as gone:
            gone.sendall(post(server, body))
            wait_until(lambda: runner(server).steps > 3, "an answer")
            cancel, steps = server.engine.scheduler.cancel, list[int]()

            def noted(jobs: list[ScheduledSequence]) -> None:
                cancel(jobs)
                steps.append(runner(server).steps)

            monkeypatch.setattr(server.engine.scheduler, "cancel", noted)
        wait_until(lambda: server.engine.scheduler.n_running == 0, "the slot")
        assert runner(server).steps - steps[0] <= 2
        assert server.metric('orinllm_request_success_total{finished_reason="cancelled"}') == 1
        # A stream's 200 was sent before; an answer that nobody waits for has no status but this.
        status, name = 200 if stream else 499, "orinllm_requests_total"
        path = 'path="/v1/chat/completions"'
        counted = f'{name}{{{path},status="{status}"}}'
        wait_until(lambda: server.metric(counted) == 1, "the count")


@pytest.mark.parametrize("stage", ["queue", "prompt"])
def test_who_goes_away_before_the_first_token(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait or whose prompt is computed leave nothing, and nobody else is disturbed."""
    with live(toy(slots=1 if stage == "queue" else 2, step_seconds=0.02)) as server:
        fill, filled = runner(server).fill_pages, list[int]()

        def slowly(pages: Any, tokens: Any, start: int, end: int) -> None:
            time.sleep(0.1)
            filled.append(end)
            fill(pages, tokens, start, end)

        asked = {**ASK, "stream": True, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        other = iter(server.client().chat.completions.create(**asked))
        next(other)
        monkeypatch.setattr(runner(server), "fill_pages", slowly)
        body = json.dumps({"model": "test", "prompt": [500] * 1900, "max_tokens": 5}).encode()
        scheduler = server.engine.scheduler
        with closing(connect(server)) as gone:
            gone.sendall(post(server, body, "/v1/completions"))
            if stage == "queue":
                wait_until(lambda: scheduler.n_waiting == 1, "the queue")
            else:
                wait_until(lambda: bool(filled), "a piece of the prompt")
        wait_until(lambda: (scheduler.n_running, scheduler.n_waiting) == (1, 0), "the end")
        assert max(filled, default=0) < 1899
        next(other)


def test_slow_readers_do_not_slow_others() -> None:
    """A client that reads nothing of a long answer holds up nobody."""
    body = json.dumps({**ASK, "stream": True, "max_tokens": 1900, "ignore_eos": True}).encode()
    with live(toy(slots=4, script=[5000] * 2000)) as server:
        readers = [connect(server) for _ in range(3)]
        for reader in readers:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(post(server, body))
        wait_until(lambda: server.engine.scheduler.n_running == 3, "the slow ones")
        assert "length" in complete(server, [500, 501])
        wait_until(lambda: server.engine.scheduler.n_running == 0, "their ends")
        for reader in readers:
            reader.close()


def test_half_requests_and_idle_connections() -> None:
    """500 that say nothing, and some that stop in the middle, are nobody's trouble."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most[1], most[1]))
    with live(toy()) as server:
        idle = [connect(server) for _ in range(500)]
        halves = [post(server, b'{"model": "te')[:-5], b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost"]
        for half in halves * 10:
            idle.append(connect(server))
            idle[-1].sendall(half)
        # The client's patience is a minute.
        answer = server.client().chat.completions.create(**ASK, max_tokens=5)
        assert answer.usage is not None and answer.usage.completion_tokens == 5
        for one in idle:
            one.close()
        wait_until(lambda: server.metric("process_open_fds") < 200, "the descriptors")


def test_a_client_that_takes_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedConnection, "patience", 1.0)
    with live(toy(step_seconds=0.12)) as server:
        # Who waits for a long answer is not one.
        assert "length" in complete(server, [500], ignore_eos=True)
        monkeypatch.setattr("orinllm.server.fields.BODY_SECONDS", 0.2)
        with closing(connect(server)) as silent:
            assert silent.recv(10) == b""
        with closing(connect(server)) as half:
            half.sendall(post(server, b"x" * 100)[:-50])
            assert half.recv(12) == b"HTTP/1.1 408"


def test_more_connections_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest idle one goes, and who asks gets an answer."""
    monkeypatch.setattr(LimitedConnection, "most", lambda _: 4)
    with live(toy()) as server:
        idle = [connect(server) for _ in range(8)]
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert idle[0].recv(10) == b""
        for one in idle:
            one.close()


def test_large_and_broken_bodies() -> None:
    with live(toy()) as server:
        large = b'{"prompt": "' + b"x" * (10 << 20) + b'"}'
        with closing(connect(server)) as one:
            one.sendall(post(server, large[:1000], Content_Length=str(len(large))))
            assert one.recv(12) == b"HTTP/1.1 413"

        def pieces() -> Any:
            yield from (large[i : i + 65536] for i in range(0, len(large), 65536))

        headers = {"Content-Type": "application/json"}
        try:
            status = httpx.post(
                f"{server.url}/v1/completions", content=pieces(), headers=headers
            ).status_code
        except httpx.WriteError:  # the server hung up while it was still being told
            status = 413
        assert status == 413
        deep = b"[" * 200_000
        for body in (deep, b'{"model": NaN}', b"\xff\xfe", b"[]", b"null", b""):
            reply = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
            assert (reply.status_code, "error" in reply.json()) == (400, True)
        # As large as it may be, and too long for the context: both numbers, and nothing computed.
        words = "word " * (MOST_BYTES // 5 - 100)
        fields = {"model": "test", "prompt": words}
        reply = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=120)
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        assert re.search(r"2048 tokens.*at least \d+ tokens", reply.json()["error"]["message"])
        assert runner(server).computed == 0


def test_a_full_queue_says_when_to_come_again() -> None:
    with live(toy(slots=1, queue=1, step_seconds=0.02)) as server:
        asked = {**ASK, "stream": True, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        first = server.client().chat.completions.create(**asked)
        next(iter(first))
        second = server.client().chat.completions.create(**asked)
        with pytest.raises(openai.RateLimitError) as full:
            server.client().chat.completions.create(**asked)
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"
        assert server.metric("orinllm_num_requests_waiting") == 1
        first.close()
        next(iter(second))
        second.close()


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_are_places_of_the_text(stream: bool) -> None:
    """A character of several tokens is there with its last one."""
    script = description().tokenizer.encode("é日本x")
    asked: Any = {"model": "test", "prompt": "a", "logprobs": 0, "stream": stream}
    with live(toy(script=script)) as server:
        answer: Any = server.client().completions.create(**asked)
        found = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    assert "".join(choice.text for choice in found) == "é日本x"
    offsets = [at for choice in found if choice.logprobs for at in choice.logprobs.text_offset]
    assert (len(script), offsets) == (5, [0, 1, 1, 2, 3])


def test_while_it_loads() -> None:
    go = threading.Event()

    def slowly(watch: Any) -> Any:
        assert go.wait(60)
        return toy()(watch)

    with live(slowly, wait=False) as server:
        reply = httpx.get(f"{server.url}/health")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        with pytest.raises(openai.InternalServerError, match="the model is loading"):
            server.client().chat.completions.create(**ASK)
        go.set()
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "the model")


def test_a_failure_in_the_middle_is_an_event() -> None:
    """The stream ends with the error, the whole answer is one, and the next request is told."""
    with live(toy(step_seconds=0.02)) as server:
        stream = server.client().chat.completions.create(**ASK, stream=True, max_tokens=1000)
        chunks = iter(stream)
        next(chunks)

        def broken(rows: object) -> None:
            raise OSError("the device is gone")

        runner(server).submit_step = broken  # type: ignore[method-assign]
        with pytest.raises(openai.APIError, match="the device is gone"):
            list(chunks)
        wait_until(lambda: bool(server.failures), "the failure")  # said after the event
        assert server.failures == ["the engine failed: OSError: the device is gone"]
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            server.client().chat.completions.create(**ASK)


def test_logits_that_are_no_numbers_fail_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(toy(script=[5, 6, -1])) as server:
        with pytest.raises(openai.InternalServerError, match="logits are no numbers"):
            server.client().chat.completions.create(**ASK)
        assert httpx.get(f"{server.url}/health").status_code == 200
    # A form that still allows tokens is not to blame.
    form: Any = {"extra_body": {"json_schema": {"type": "string"}}}
    wrong = pytest.raises(openai.InternalServerError, match="logits are no numbers")
    with live(toy(script=[-1])) as server, wrong:
        server.client().chat.completions.create(**ASK, **form)


def test_hosts_and_origins() -> None:
    allowed: Any = {"allow_hosts": ("board.example",), "allow_origins": (PAGE,)}
    with live(toy(), **allowed) as server:
        for headers, status in ORIGINS:
            where = urlsplit(server.url)
            with closing(http.client.HTTPConnection(where.hostname or "", where.port)) as one:
                body = json.dumps({**ASK, "max_tokens": 2})
                given = {"Content-Type": "application/json", **headers}
                one.request("POST", "/v1/chat/completions", body, given)
                reply = one.getresponse()
                found = (reply.status, "error" in json.loads(reply.read()))
                cors = reply.getheader("Access-Control-Allow-Origin")
            assert found == (status, status != 200), headers
            assert cors == (PAGE if headers.get("Origin") == PAGE else None), headers


ORIGINS: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    ({"Host": "localhost:80"}, 200),
    ({"Host": "evil.example"}, 403),
    ({"Host": "evil-localhost"}, 403),
    ({"Host": "board.example"}, 200),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "https://page.example"}, 200),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
    ({"Content-Type": "text/plain", "Origin": "https://evil.example"}, 403),
    ({"Content-Type": "text/plain"}, 415),
]


def test_keys() -> None:
    with live(toy(), keys=("first-key", "second-key")) as server:
        for key in ("first-key", "second-key"):
            assert [m.id for m in client(server.url, key).models.list()] == ["test"]
            alike = httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": key})
            assert alike.status_code == 200
        for wrong in ("first-ke", "first-key2", '"'):
            header = {"Authorization": f"Bearer {wrong}"}
            reply = httpx.get(f"{server.url}/v1/models", headers=header)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            client(server.url, "third").models.list()
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/").status_code == 200


def test_the_page() -> None:
    """It runs its own script alone, and loads nothing from elsewhere."""
    with live(toy()) as server:
        reply = httpx.get(server.url)
        policy = reply.headers["content-security-policy"]
        nonce = re.search(r"script-src 'nonce-([^']+)'", policy)
        assert nonce is not None and f'<script nonce="{nonce[1]}">' in reply.text
        assert "default-src 'none'" in policy
        assert not re.search(r"(src|href)=\"(https?:)?//", reply.text)
        assert httpx.get(server.url).headers["content-security-policy"] != policy


def test_requests_leave_nothing_behind() -> None:
    """As many_requests.py shows it for 100,000."""
    with live(toy(slots=8)) as server:
        found = list(states(server, 500, 600))
        assert found[-1].requests >= 500
        assert found[-1].descriptors - found[0].descriptors <= 5
        assert found[-1].memory - found[0].memory < 20 << 20
        assert server.engine.scheduler.store.n_used_pages == 0


@pytest.mark.parametrize(("stream", "late"), [(False, False), (True, False), (True, True)])
def test_a_client_that_closes_its_half_gets_its_answer(stream: bool, late: bool) -> None:
    """As `nc -N` does; one that is gone frees its slot all the same. late: amid a stream."""
    body = json.dumps({**ASK, "stream": stream, "max_tokens": 10, "ignore_eos": True}).encode()
    with live(toy(slots=1, step_seconds=0.05)) as server, closing(connect(server)) as half:
        half.sendall(post(server, body, Connection="close"))
        got = half.recv(65536) if late else b""
        half.shutdown(socket.SHUT_WR)
        got += b"".join(iter(lambda: half.recv(65536), b""))
        got = got.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in got
        assert b"HTTP/1.1" not in got[8:]
        assert server.metric('orinllm_request_success_total{finished_reason="length"}') == 1


def test_a_cut_character_is_not_shown() -> None:
    tokens = description().tokenizer.encode("a 🦜")
    with live(toy(script=tokens)) as server:
        for n in range(1, len(tokens) + 1):
            asked: Any = {"model": "test", "prompt": [500], "max_tokens": n}
            for path in ("completions", "chat/completions"):
                more = asked if path == "completions" else {**ASK, "max_tokens": n}
                found = httpx.post(f"{server.url}/v1/{path}", json=more).json()["choices"][0]
                text = found.get("text", (found.get("message") or {}).get("content"))
                assert "�" not in text and "a 🦜".startswith(text)
                with httpx.stream(
                    "POST", f"{server.url}/v1/{path}", json={**more, "stream": True}
                ) as stream:
                    lines = [line[6:] for line in stream.iter_lines() if line[:7] == "data: {"]
                parts = [json.loads(line)["choices"][0] for line in lines]
                said = "".join(
                    p.get("text") or p.get("delta", {}).get("content", "") for p in parts
                )
                assert said == text and parts[-1]["finish_reason"] in ("length", "stop")
    assert len(tokens) > 3  # the parrot is several tokens


def test_a_bad_request_s_line_names_its_client(capfd: pytest.CaptureFixture[str]) -> None:
    with live(toy()) as server, closing(connect(server)) as one:
        port = one.getsockname()[1]
        one.sendall(b"\x16\x03\x01\r\n\r\n")
        assert one.recv(4096).startswith(b"HTTP/1.1 400")
    assert f"127.0.0.1:{port}: Invalid HTTP request" in capfd.readouterr().err


def test_a_refused_field_s_line_names_its_client(capfd: pytest.CaptureFixture[str]) -> None:
    """The line is one line, whatever the client wrote."""
    wanted = {"type": "json\n\x1b[31mforged"}
    body = {"model": "test", "messages": [{"role": "user", "content": "x"}]}
    with live(toy()) as server, httpx.Client() as asking:
        path = f"{server.url}/v1/chat/completions"
        reply = asking.post(path, json={**body, "response_format": wanted})
        assert reply.status_code == 400
        (line,) = [one for one in capfd.readouterr().err.splitlines() if "forged" in one]
    assert re.search(r"127\.0\.0\.1:\d+: /v1/chat/completions: response_format", line)
    assert "json\\n" in line and "\x1b" not in line
