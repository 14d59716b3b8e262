"""The process that renders chat templates, `python -m` with SECONDS and MEMORY (job_loop.py).

A template is code of whoever made the model's file. jinja2's sandbox keeps it away from Python's
insides; limits of the process keep it from using all time and memory (job_loop.py). Lists may grow,
which the `transformers` library's sandbox forbids and Kimi-K2's template needs: all that a template
can change came with its job or was made in it, and goes with it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from orinllm.text.processes.job_loop import answer_jobs_until_eof

# The name of the clock that templates read.
_NOW = "strftime_now"
# Characters of a text, and more for each byte of its job: what a template adds to a conversation.
_TEXT, _LONGER = 1 << 20, 4
# Characters of what a template says is wrong.
_SAID = 1000


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is the result."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """A namespace without names that begin with an underscore: they are Python's own."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *values = args
        given = dict(*values, **attributes)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute '{name}'")


def _iterator_list(value: Any) -> list[Any]:
    """Return what a filter gives one by one: llama.cpp's Jinja has lists there."""
    if not isinstance(value, Iterator):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return list(value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _jinja_environment(guard: str) -> SandboxedEnvironment:
    """Return the environment; texts of users have `guard` in them, which stays as it is."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as models saw it in training: not escaped for HTML, as jinja2's own filter does."""
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_iterator_list,
        )
        return text.replace(json.dumps(guard)[1:-1], guard) if ensure_ascii else text

    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _SafeNamespace
    return environment


@functools.lru_cache(16)
def _compiled_template(source: str, guard: str) -> jinja2.Template:
    return _jinja_environment(guard).from_string(source)


def _variables_read(source: str, guard: str) -> set[str]:
    """Return the names that a template wants to be given."""
    environment = _jinja_environment(guard)
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return names - environment.globals.keys() - {_NOW}


def _answer_job(job: Mapping[str, Any], most: int) -> dict[str, str]:
    """Return the text of a job, of at most `most` characters, or what is wrong with it."""
    try:
        template = _compiled_template(job["source"], job["guard"])
        if (variables := job["variables"]) is None:
            return {"text": " ".join(sorted(_variables_read(job["source"], job["guard"])))}
        now = datetime.fromisoformat(job["now"])
        text = template.render({**variables, _NOW: now.strftime})
        if len(text) <= most:
            return {"text": text}
        said = f"it makes a text of {len(text):,} characters, more than {most:,}"
    except jinja2.TemplateError as error:
        said = str(error)
    except MemoryError:
        raise
    except Exception as error:
        # The template is the file's code: what Python raises in it is its fault or the input's.
        said = f"{type(error).__name__}: {error}"
    return {"error": " ".join(said[:_SAID].split())}


if __name__ == "__main__":
    answer_jobs_until_eof(lambda job, size: _answer_job(job, _TEXT + _LONGER * size))
