"""A page to talk to the model, for a person who opens `/`."""

from functools import cache
from pathlib import Path

import jinja2
from starlette.responses import HTMLResponse


@cache
def _page_template() -> jinja2.Template:
    source = (Path(__file__).parent / "chat_page.html").read_text()
    return jinja2.Environment(autoescape=True).from_string(source)


def chat_page_response(model: str, nonce: str) -> HTMLResponse:
    """Return the page; `nonce` marks its own script and style, and no other runs."""
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    text = _page_template().render(model=model, nonce=nonce)
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})
