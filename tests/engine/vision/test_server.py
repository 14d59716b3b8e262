"""Pictures over HTTP: the command's server, asked in every protocol."""

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.engine.server.live import Started, command
from tests.engine.vision import tiny

PLAIN = {"temperature": 0, "max_tokens": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("seeing")
    tiny.write_text(folder / "tiny.gguf", "gemma3")
    tiny.write_mmproj(folder / "mmproj.gguf", "gemma3")
    flags = ("--mmproj", str(folder / "mmproj.gguf"), "--allow-image-host", "127.0.0.1")
    with command(folder / "tiny.gguf", folder / "log", *flags) as started:
        yield started


def photo(seed: int = 0) -> str:
    file = io.BytesIO()
    Image.fromarray(tiny.pictures("gemma3")[seed]).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def post(server: Started, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    return answer.json() | {"status": answer.status_code}


def chat(server: Started, url: str, **more: Any) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}]
    return post(server, "/v1/chat/completions", model="tiny", messages=messages, **PLAIN | more)


def test_all_protocols_see_the_same(server: Started) -> None:
    data = photo()
    said = chat(server, f"data:image/png;base64,{data}")
    text, usage = said["choices"][0]["message"]["content"], said["usage"]
    again = chat(server, f"data:image/png;base64,{data}")
    assert again["choices"][0]["message"]["content"] == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    other = chat(server, f"data:image/png;base64,{photo(1)}")
    assert text and usage["prompt_tokens"] == other["usage"]["prompt_tokens"] > tiny.ROWS
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < tiny.ROWS

    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": blocks}]
    told = post(server, "/v1/messages", model="tiny", messages=messages, **PLAIN)
    assert told["content"][0]["text"] == text

    parts = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}", "detail": "auto"},
        {"type": "input_text", "text": "What?"},
    ]
    given = [{"role": "user", "content": parts}]
    item = post(
        server, "/v1/responses", model="tiny", input=given, temperature=0, max_output_tokens=5
    )
    assert item["output"][0]["content"][0]["text"] == text

    message = {"role": "user", "content": "What?", "images": [data]}
    options = {"temperature": 0, "num_predict": 5, "repeat_penalty": 1}
    found = post(
        server, "/api/chat", model="tiny", messages=[message], stream=False, options=options
    )
    assert found["message"]["content"] == text
    assert "vision" in post(server, "/api/show", model="tiny")["capabilities"]


def test_a_tool_may_answer_with_a_picture(server: Started) -> None:
    """In each protocol the same prompt."""
    url, data = f"data:image/png;base64,{photo()}", photo()
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result: list[dict[str, Any]] = [{"type": "text", "text": "seen:"}]
    shown = {"type": "image_url", "image_url": {"url": url}}
    asked = {"role": "user", "content": "Look."}
    told = {"role": "tool", "tool_call_id": "c", "content": [*result, shown]}
    messages = [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, told]
    said = post(server, "/v1/chat/completions", model="tiny", messages=messages, **PLAIN)
    text = said["choices"][0]["message"]["content"]
    assert text and said["usage"]["prompt_tokens"] > tiny.ROWS

    source = {"type": "base64", "media_type": "image/png", "data": data}
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c"}
    block["content"] = [*result, {"type": "image", "source": source}]
    used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    blocks = [asked, {"role": "assistant", "content": [used]}, {"role": "user", "content": [block]}]
    found = post(server, "/v1/messages", model="tiny", messages=blocks, **PLAIN)
    assert found["content"][0]["text"] == text
    output = [{"type": "input_text", "text": "seen:"}, {"type": "input_image", "image_url": url}]
    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = [asked, called, {"type": "function_call_output", "call_id": "c", "output": output}]
    more = {"temperature": 0, "max_output_tokens": 5}
    item = post(server, "/v1/responses", model="tiny", input=items, **more)
    assert item["output"][0]["content"][0]["text"] == text
    block |= {"is_error": True}
    failed = post(server, "/v1/messages", model="tiny", messages=blocks, **PLAIN)
    assert failed["usage"]["input_tokens"] and failed["status"] == 200
    result[0]["type"] = "document"
    refused = post(server, "/v1/messages", model="tiny", messages=blocks, **PLAIN)
    assert refused["error"]["message"].endswith("this server reads text and pictures only")


def test_a_picture_is_not_left_out_in_silence(server: Started) -> None:
    given = {"model": "tiny", "prompt": "What?", "images": [photo()], "stream": False}
    answer = post(server, "/api/generate", raw=True, **given)
    assert answer["status"] == 400 and "a raw prompt has no place for pictures" in answer["error"]
    assert chat(server, f"DATA:image/png;BASE64,{photo()}")["status"] == 200
    lines = base64.encodebytes(base64.b64decode(photo())).decode()
    assert chat(server, f"data:image/png;base64,{lines}")["status"] == 200


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (lambda: "data:image/png;base64,AAAA", "it is no picture"),
        (lambda: "data:image/png;base64,A", "is no base64"),
        (lambda: "data:image/png;base64,AA*AA", "is no base64"),
        (lambda: "data:image/png,A", "without base64"),
        (lambda: "file:///etc/passwd", "neither a data URI nor an http address"),
        (lambda: "http://example.com/cat.png", "fetches no picture of 'example.com'"),
        (lambda: "http://127.0.0.1:9/cat.png", "connection attempts failed"),
    ],
)
def test_what_is_no_picture_is_an_error_400(
    server: Started, url: Callable[[], str], said: str
) -> None:
    answer = chat(server, url())
    assert answer["status"] == 400 and said in answer["error"]["message"]


def test_a_picture_of_a_host_that_is_named_is_fetched(server: Started, tmp_path: Path) -> None:
    import functools
    import threading
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    (tmp_path / "photo.png").write_bytes(base64.b64decode(photo()))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        fetched = chat(server, f"http://127.0.0.1:{web.server_port}/photo.png")
        web.shutdown()
    wanted = chat(server, f"data:image/png;base64,{photo()}")
    assert fetched["choices"][0]["message"] == wanted["choices"][0]["message"]
