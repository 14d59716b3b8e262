"""Requests' bodies, as far as they may go, and whose they are."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from orinllm.server.errors import ApiError
from orinllm.server.fields import Fields, Notes, parse_json

#: Bytes of a request at most: a context of 128k tokens is about 1 MB of text.
MOST_BYTES = 8 << 20
# Bytes that take milliseconds to read: beyond, the event loop does not wait for it.
_MUCH = 1 << 16
#: Seconds in which a request must be here.
BODY_SECONDS = 30.0

T = TypeVar("T")


def client_of(request: Request) -> str:
    """Return whose turn a request is: a key's, or an address's."""
    key = request.headers.get("authorization") or request.headers.get("x-api-key")
    return key or (request.client.host if request.client else "")


async def read_request(request: Request, reader: Callable[[Fields], T], notes: Notes) -> T:
    """Read a request; raises ApiError for what it cannot be. `notes` hears what is ignored."""
    raw = await _body(request)
    if len(raw) <= _MUCH:
        return reader(Fields(parse_json(raw), notes=notes))
    return await asyncio.to_thread(lambda: reader(Fields(parse_json(raw), notes=notes)))


async def _body(request: Request) -> bytes:
    """Read a body; raises ApiError for one that is too large, too slow, or not said to be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Some of Ollama's clients say nothing. A page's request would say its Origin, and be refused.
    unsaid = not kind and request.url.path.startswith("/api/")
    if kind != "application/json" and not unsaid:
        message = f"Content-Type '{kind}' is not application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    too_large = ApiError(413, f"a request has at most {MOST_BYTES} bytes", code="request_too_large")
    if int(request.headers.get("content-length") or 0) > MOST_BYTES:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                raw += piece
                if len(raw) > MOST_BYTES:
                    raise too_large
    except TimeoutError:
        why = f"the request was not here after {BODY_SECONDS:g} s"
        raise ApiError(408, why, code="timeout", headers={"Connection": "close"}) from None
    return bytes(raw)
