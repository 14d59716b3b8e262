"""Pictures of requests: data in base64, or an address of a host that --allow-image-host names."""

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from orinllm.network.vision.prepare import MOST_BYTES
from orinllm.server.errors import ApiError, invalid_error, unsupported_error
from orinllm.server.fields import Fields

# Seconds in which a picture of another host must be here.
_SECONDS = 10.0
# What all protocols say of other kinds of parts.
READS = "this server reads text and pictures only"


@dataclass(frozen=True)
class RemotePicture:
    """A picture that is not fetched yet. param: where a request has its address."""

    url: str
    param: str


def picture_part_of_url(url: str, param: str) -> dict[str, Any]:
    """Return a part of a message for a data URI or an address; raises ApiError."""
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:"):
        try:
            scheme = urlsplit(url).scheme
        except ValueError as error:  # of brackets that are no IPv6 address
            raise invalid_error(param, f"is no address: {error}") from None
        if scheme not in ("http", "https"):
            raise invalid_error(param, "neither a data URI nor an http address")
        return {"type": "image", "image": RemotePicture(url, param)}
    if not comma or not head.lower().endswith(";base64"):
        raise invalid_error(
            param, "a data URI without base64; data:image/png;base64,... was expected"
        )
    return picture_part_of_base64(data, param)


def picture_part_of_base64(data: str, param: str) -> dict[str, Any]:
    """Return a part of a message for a picture's file in base64; raises ApiError.

    It may have line ends, which the command `base64` puts behind every 76 signs (RFC 2045).
    """
    try:
        return {"type": "image", "image": base64.b64decode("".join(data.split()), validate=True)}
    except ValueError:  # binascii.Error is one
        raise invalid_error(param, "is no base64") from None


def read_text_or_parts(
    part: Fields, name: str, read_part: Callable[[Fields], dict[str, Any]], joint: str
) -> str | list[dict[str, Any]]:
    """Return a text that may come in parts, or these where there are pictures among them."""
    value = part.value(name)
    if value is None or isinstance(value, str):
        return value or ""
    found = []
    for inner in part.subfields_of_each(name):
        found.append(read_part(inner))
        inner.note_unread_or_raise()
    if any(each["type"] == "image" for each in found):
        return found
    return joint.join(each["text"] for each in found)


def with_fetched_pictures(
    messages: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Return messages with what their addresses lead to; raises ApiError for other hosts."""
    return [
        {**message, "content": [_with_fetched_picture(part, hosts) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _with_fetched_picture(part: Any, hosts: Sequence[str]) -> Any:
    remote = part.get("image") if isinstance(part, Mapping) else None
    if not isinstance(remote, RemotePicture):
        return part
    host = (urlsplit(remote.url).hostname or "").lower()
    if host not in hosts:
        raise unsupported_error(
            remote.param,
            f"this server fetches no picture of '{host}' (--allow-image-host); "
            "a data URI was expected",
        )
    return {"type": "image", "image": _fetch_picture(remote)}


def _fetch_picture(remote: RemotePicture) -> bytes:
    try:
        return asyncio.run(_download_picture(remote))
    except TimeoutError:
        raise invalid_error(
            remote.param, f"its host took more than {_SECONDS:.0f} seconds"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ApiError(400, f"{remote.param}: {error}", param=remote.param) from None


async def _download_picture(remote: RemotePicture) -> bytes:
    """Return what an address has: without redirects, which could lead to another host."""
    data = bytearray()
    # One limit of all: httpx's own are of each piece alone, and a head may have a thousand. No
    # proxy of the environment, and nothing that a few bytes could unpack to.
    async with (
        asyncio.timeout(_SECONDS),
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream("GET", remote.url, headers={"Accept-Encoding": "identity"}) as answer,
    ):
        if answer.status_code != 200:
            raise invalid_error(remote.param, f"its host answers with status {answer.status_code}")
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > MOST_BYTES:
                raise invalid_error(remote.param, f"the picture has more than {MOST_BYTES} bytes")
    return bytes(data)
