"""The process that renders chat templates: `python -m orinllm.jinja_process SECONDS MEMORY`.

A template is code of whoever made the model's file. jinja2's sandbox, set up as the `transformers`
library does it, keeps it away from Python's insides; limits of the process keep it from using all
time and memory: SECONDS of CPU time for each, MEMORY bytes for all. A line of JSON on standard
input is a job, a line on standard output its result.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# The name of the clock that templates read.
_NOW = "strftime_now"
# Characters of a text, and more for each byte of its job: what a template adds to a conversation.
_TEXT, _LONGER = 1 << 20, 4


class _Generation(jinja2.ext.Extension):
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


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def _environment(guard: str) -> ImmutableSandboxedEnvironment:
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
        )
        return text.replace(json.dumps(guard)[1:-1], guard) if ensure_ascii else text

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _SafeNamespace
    return environment


@functools.lru_cache(16)
def _compiled(source: str, guard: str) -> jinja2.Template:
    return _environment(guard).from_string(source)


def _reads(source: str, guard: str) -> set[str]:
    """Return the names that a template wants to be given."""
    environment = _environment(guard)
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return names - environment.globals.keys() - {_NOW}


def _answer(job: Mapping[str, Any], most: int) -> dict[str, str]:
    """Return the text of a job, of at most `most` characters, or what is wrong with it."""
    try:
        template = _compiled(job["source"], job["guard"])
        if (variables := job["variables"]) is None:
            return {"text": " ".join(sorted(_reads(job["source"], job["guard"])))}
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
    return {"error": " ".join(said.split())}


def _limit(which: int, least: int) -> None:
    """Limit a resource; where a service may not, its own limits hold."""
    _, most = resource.getrlimit(which)
    with contextlib.suppress(PermissionError):
        resource.setrlimit(which, (least if most < 0 else min(least, most), most))


def main() -> None:
    """Answer jobs until there are no more."""
    seconds, memory = map(int, sys.argv[1:])
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CORE, 0)
    too_much = json.dumps({"error": f"it takes more than {memory >> 20} MB of memory"})
    for line in sys.stdin.buffer:
        # Beyond the limit a signal ends the process; whoever gave the job sees that.
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
        try:
            said = json.dumps(_answer(json.loads(line), _TEXT + _LONGER * len(line)))
        except MemoryError:
            said = too_much
        print(said, flush=True)


if __name__ == "__main__":
    main()
