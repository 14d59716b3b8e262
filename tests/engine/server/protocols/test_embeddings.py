"""/v1/embeddings by OpenAI's own client, against the float64 reference and against a toy."""

import base64
import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tests.engine.conftest import Load, Synthetic
from tests.engine.models import smollm2
from tests.engine.server.conftest import MODEL
from tests.engine.server.live import Live, Started, live, metric, wait_until
from tests.engine.server.test_clients import connect, post, runner
from tests.engine.server.toy import toy

from orinbench.check.reference import Reference
from orinbench.model import open_model
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.sequence import ScheduledSequence
from orinllm.choose.pooling import PooledStates, choose_pooling
from orinllm.cpu.program import CHUNK
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.host_compiler import compiler_environment
from orinllm.loader import Network
from orinllm.model import ModelDescription
from orinllm.other.tinygrad_llm import UpstreamExecutor

TEXTS = ["The capital of France is Paris.", "Un café, s'il vous plaît."]
# Keys and values of the CPU's path are 16-bit floats.
HALVES = 2e-3


def embed(api: openai.OpenAI, given: Any, model: str = MODEL, **fields: Any) -> Any:
    return api.embeddings.create(model=model, input=given, **fields)


def unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(rows / np.linalg.norm(rows))


def test_vectors_are_the_means_of_the_references_states(api: openai.OpenAI) -> None:
    words = ModelDescription.read(smollm2(), 512).tokenizer
    ids = [words.encode(text) for text in TEXTS]
    reference = Reference(open_model(smollm2()), context=512)
    want = unit(reference.hidden_states(ids[1]).mean(0))
    answer = embed(api, TEXTS)  # the client asks for base64 by itself
    assert [item.index for item in answer.data] == [0, 1]
    assert (answer.object, answer.model) == ("list", MODEL)
    n_tokens = sum(map(len, ids))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (n_tokens, n_tokens)
    first, second = (np.array(item.embedding) for item in answer.data)
    assert np.abs(second - want).max() < HALVES
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-6)
    assert np.dot(first, second) < 0.9  # so that one vector for all would be found
    same = embed(api, ids).data
    floats = embed(api, TEXTS[1], encoding_format="float").data
    assert [item.embedding for item in same] == [item.embedding for item in answer.data]
    assert np.array(floats[0].embedding, np.float32).tolist() == answer.data[1].embedding
    assert embed(api, ids[0]).data[0].embedding == answer.data[0].embedding


def test_base64_is_of_little_endian_floats(smol: Started) -> None:
    body = {"model": MODEL, "input": "Hi", "user": "me"}
    url = f"{smol.url}/v1/embeddings"
    given = [
        httpx.post(url, json={**body, "encoding_format": form}, timeout=60).json()["data"][0]
        for form in ("float", "base64")
    ]
    floats, text = given[0]["embedding"], given[1]["embedding"]
    raw = base64.b64decode(text)
    assert list(struct.unpack(f"<{len(floats)}f", raw)) == np.array(floats, np.float32).tolist()
    assert httpx.get(f"{smol.url}/v1/models").json()["data"][0]["pooling"] == "mean"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"dimensions": 64}, "dimensions", "vectors of this model have 576 numbers"),
        ({"encoding_format": "int8"}, "encoding_format", "is none of float, base64"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "neither a text"),
        ({"input": ["a", 1]}, "input", "no array of tokens"),
        ({"input": [10**9]}, "input", "is not from 0 to"),
        ({"input": "a " * 513}, "input", "maximum context length is 512 tokens"),
        ({"input": "a " * 10**6}, "input", "at least"),
        ({"input": [[1]] * 2049}, "input", "2049 texts; at most 2048"),
    ],
)
def test_what_cannot_be_is_named(
    smol: Started, fields: dict[str, Any], param: str, says: str
) -> None:
    body = {"model": MODEL, "input": "Hi", **fields}
    reply = httpx.post(f"{smol.url}/v1/embeddings", json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_a_field_that_nobody_knows_is_named(smol: Started) -> None:
    body = {"model": MODEL, "input": "Hi", "truncate": True}
    reply = httpx.post(f"{smol.url}/v1/embeddings", json=body, timeout=60)
    assert (reply.status_code, reply.headers["x-ignored-fields"]) == (200, "truncate")


def test_documents_are_ranked_by_their_cosines(smol: Started, api: openai.OpenAI) -> None:
    """In the words of Jina and Cohere, at each of the three paths that their clients ask."""
    documents = ["Bread is made of flour.", "France's capital is Paris.", "Paris"]
    query, *vectors = (np.array(item.embedding) for item in embed(api, [TEXTS[0], *documents]).data)
    cosines = [float(vector @ query) for vector in vectors]
    best = sorted(range(3), key=lambda i: -cosines[i])
    body: Any = {"model": MODEL, "query": TEXTS[0], "documents": documents}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = httpx.post(f"{smol.url}{path}", json=body, timeout=60).json()["results"]
        assert [one["index"] for one in found] == best
        assert all(set(one) == {"index", "relevance_score"} for one in found)
        for one in found:
            assert one["relevance_score"] == pytest.approx(cosines[one["index"]], abs=1e-6)
    short = {"top_n": 1, "return_documents": True, "documents": [{"text": t} for t in documents]}
    (one,) = httpx.post(f"{smol.url}/rerank", json={**body, **short}, timeout=60).json()["results"]
    assert (one["index"], one["document"]) == (best[0], {"text": documents[best[0]]})
    wrong: dict[str, Any]
    for wrong, param in (
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": [{"title": "a"}]}, "documents[0]"),
        ({"top_n": 0}, "top_n"),
    ):
        reply = httpx.post(f"{smol.url}/v1/rerank", json={**body, **wrong}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_text_may_fill_the_context(smol: Started, api: openai.OpenAI) -> None:
    """No room for an answer is needed; and the vector's own width is no wish for another."""
    answer = embed(api, [[7] * 512], dimensions=576)
    assert answer.usage.prompt_tokens == 512
    with pytest.raises(openai.BadRequestError) as caught:
        embed(api, [[7] * 513])
    assert caught.value.code == "context_length_exceeded"
    assert "513 tokens" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        embed(api, "Hi", model="other")
    assert metric(smol.url, 'orinllm_phase_seconds_total{phase="prefill"}') > 0


@pytest.fixture(scope="module", params=["mean", "last"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Live, str]]:
    with live(toy(slots=2, queue=1, pages=48, pooling=request.param)) as found:
        yield found, request.param


def expected(ids: list[int], kind: str) -> NDArray[np.float64]:
    rows = np.array([[t, i, ids[max(0, i - 1)]] for i, t in enumerate(ids)], np.float64)
    return unit(rows[-1] if kind == "last" else rows.mean(0))


def test_beside_answers_and_beyond_the_queue(server: tuple[Live, str]) -> None:
    """Texts of many chunks come one by one between others' tokens; a queue of one takes them."""
    it, kind = server
    texts = [[500 + i + j for j in range(40 * i + 1)] for i in range(12)]
    found = list[Any]()
    asks = [
        threading.Thread(
            target=lambda: found.append(embed(it.client(), texts, "test", encoding_format="float"))
        )
        for _ in range(2)
    ]
    stream = iter(
        it.client().completions.create(
            model="test", prompt="Go", max_tokens=200, stream=True, temperature=0
        )
    )
    next(stream)
    for ask in asks:
        ask.start()
    said = len(list(stream))
    for ask in asks:
        ask.join()
    alone = it.client().completions.create(model="test", prompt="Go", max_tokens=200, temperature=0)
    assert said >= 150 and alone.choices[0].finish_reason == "length"
    for answer in found:
        for ids, item in zip(texts, answer.data, strict=True):
            assert np.abs(np.array(item.embedding) - expected(ids, kind)).max() < 1e-6
    assert len(found) == 2
    assert it.engine.scheduler.store.n_used_pages == 0


def test_who_goes_away_stops_the_work(server: tuple[Live, str], monkeypatch: Any) -> None:
    it, _ = server
    states, done = runner(it).prefill_for_hidden_states, list[int]()

    def slow(*given: Any) -> Any:
        time.sleep(0.02)
        done.append(1)
        return states(*given)

    monkeypatch.setattr(runner(it), "prefill_for_hidden_states", slow)
    body = json.dumps({"model": "test", "input": [[9] * 5] * 400}).encode()
    with closing(connect(it)) as gone:
        gone.sendall(post(it, body, "/v1/embeddings"))
        wait_until(lambda: bool(done), "the first text")
    wait_until(lambda: it.engine.scheduler.n_running == 0, "an idle scheduler")
    assert len(done) < 400
    assert it.engine.scheduler.store.n_used_pages == 0


def test_only_the_first_text_may_be_turned_away(
    server: tuple[Live, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    it, _ = server
    submit, asked = it.engine.scheduler.submit, list[bool]()

    def noted(jobs: list[ScheduledSequence], goes_on: bool = False) -> None:
        asked.append(goes_on)
        submit(jobs, goes_on)

    monkeypatch.setattr(it.engine.scheduler, "submit", noted)
    embed(it.client(), [[5], [6], [7]], "test")
    assert asked == [False, True, True]


def test_logits_that_are_no_numbers(server: tuple[Live, str], monkeypatch: Any) -> None:
    it, _ = server
    monkeypatch.setattr(
        runner(it), "prefill_for_hidden_states", lambda *_: np.full((1, 3), np.nan, np.float32)
    )
    with pytest.raises(openai.InternalServerError, match="are no numbers"):
        embed(it.client(), [[5]], "test")


def test_memory_that_ran_out_begins_a_mean_anew() -> None:
    """A text whose pages were taken away is computed from its first token again."""
    pool, rows = PooledStates("mean"), np.array([[3.0, 0], [0, 4]], np.float32)
    pool.add_states(0, rows * 100)
    pool.add_states(0, rows[:1])
    pool.add_states(1, rows[1:])
    assert pool.unit_vector.tolist() == pytest.approx([0.6, 0.8])
    with pytest.raises(AssertionError):
        pool.add_states(5, rows)


@pytest.mark.parametrize(
    ("kind", "asked", "want"),
    [(0, None, "mean"), (3, None, "last"), (1, "last", "last"), (2, "mean", "mean")],
)
def test_pooling_is_the_files_unless_it_is_asked_for(
    kind: int, asked: Literal["mean", "last"] | None, want: str
) -> None:
    gguf = GGUF.open(smollm2())
    gguf.metadata.add_lazily("llama.pooling_type", lambda: kind)
    assert choose_pooling(gguf, "llama", asked) == want
    gguf.metadata.add_lazily("llama.pooling_type", lambda: 2)
    with pytest.raises(BadInput, match="pooling_type is 2; 1 "):
        choose_pooling(gguf, "llama", None)


def test_a_whole_text_ends_as_the_file_wants() -> None:
    words = ModelDescription.read(smollm2(), 512).tokenizer
    plain = words.encode("Hi")
    assert words.encode_with_ends("Hi") == plain
    words.add_bos = words.add_eos = True
    assert words.encode_with_ends("Hi") == [words.bos_id, *plain, words.eos_id]


def test_states_of_the_fused_kernels(emulated: Load, synthetic: Synthetic) -> None:
    """In chunks, in pages of any order."""
    path = synthetic("tiny", "F16")
    tokens = [(37 * i) % 1000 + 3 for i in range(66)]
    want = Reference(open_model(path), context=128).hidden_states(tokens)
    executor = emulated(path, 128, 3)
    runner = FusedRunner(executor, 2)
    first = runner.prefill_for_hidden_states([2, 0], tokens, 0, 64)
    found = np.concatenate([first, runner.prefill_for_hidden_states([2, 0], tokens, 64, 66)])
    assert np.abs(found - want).max() / np.abs(want).max() < HALVES * 5


def test_states_of_the_general_path(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Over a chunk's end; logits and states may take turns."""
    for name, value in compiler_environment(tmp_path, os.environ).items():
        monkeypatch.setenv(name, value)
    path = synthetic("tiny", "F16")
    network = Network.read(path, 64)
    tokens = [(37 * i) % 1000 + 3 for i in range(CHUNK + 4)]
    executor = UpstreamExecutor(network.gguf, network.config, "CPU", 64)
    want = Reference(open_model(path), context=64).hidden_states(tokens)
    executor.prefill(tokens[:3])
    found = executor.prefill_for_hidden_states(tokens[3:], 3)
    assert found.shape == want[3:].shape
    assert np.abs(found - want[3:]).max() / np.abs(want).max() < HALVES * 5
    with pytest.raises(BadInput, match="do not fit a context of 64"):
        executor.prefill_for_hidden_states(tokens, 60)
