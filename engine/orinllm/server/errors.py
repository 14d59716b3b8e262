"""Errors, in the words of the protocol that was asked."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse


class ApiError(Exception):
    """A request that is refused, or failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _shortened_text(message), param and _shortened_text(param)
        self.headers = dict(headers or {})

    def error_object(self, path: str = "") -> dict[str, Any]:
        """Return the error object of a path's protocol, which is OpenAI's by default."""
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        if path.startswith("/api/"):
            return {"error": self.message}
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, other),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str = "") -> JSONResponse:
        """Return the answer of a path."""
        return JSONResponse(self.error_object(path), self.status, self.headers)


# Characters at each end of a text that may be megabytes of a client's own words.
_KEPT = 500


def _shortened_text(text: str) -> str:
    """Return a text that may repeat what a client sent, which may be long or no Unicode."""
    if len(text) > 2 * _KEPT:
        text = f"{text[:_KEPT]} [...] {text[-_KEPT:]}"
    return text.encode(errors="backslashreplace").decode()


_TYPES = {429: "rate_limit_error", 403: "permission_error"}
# Anthropic's names; others of theirs are no answers of this server.
_ANTHROPIC = {
    **dict.fromkeys((400, 405, 408, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def invalid_error(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Return what a wrong value of a field is answered with."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported_error(param: str, message: str) -> ApiError:
    """Return what a field that means something which cannot be done is answered with."""
    return invalid_error(param, message, "unsupported_parameter")


def sequence_failed_error(why: str) -> ApiError:
    """Return what a request is answered with whose sequence failed."""
    return ApiError(503 if "shutting down" in why else 500, why, code="failed")


def too_long_error(tokens: int, context: int, param: str, least: bool = False) -> ApiError:
    """Return what a prompt is answered with that leaves no room for an answer.

    `least`: it was not counted, but has at least so many tokens. The `input` of embeddings needs
    no room behind it.
    """
    what, need = "prompt", ", and at least one is needed for the answer"
    if param == "input":
        what, need = "input", ""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, your {what} has "
        f"{'at least ' * least}{tokens} tokens{need}.",
        param=param,
        code="context_length_exceeded",
    )
