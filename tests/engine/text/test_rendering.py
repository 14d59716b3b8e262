"""Limits of a chat template: no endless run, no exhausted memory, no access outside it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.models import tokenizer

from orinllm.errors import BadInput
from orinllm.text.template import ChatTemplate, TemplateRenderer

MEMORY = 256 << 20


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(seconds=1, memory=MEMORY)
    yield made
    made.close()


def job(source: str, **variables: Any) -> dict[str, Any]:
    return {"source": source, "guard": "", "variables": variables, "now": "2026-11-22T12:00:00"}


TWICE = (
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (LOOP, "it takes more than 1 s"),
        (TWICE, "it takes more than 256 MB of memory"),
        ("{{ '%999999999d' % 3 }}", "it takes more than 256 MB of memory"),
        ("{{ 'x' * 10**11 }}", "it takes more than 256 MB of memory"),
        ("{{ messages | tojson(indent=10**9) }}", "it takes more than 256 MB of memory"),
        ("{{ 'x' * 2000000 }}", "it makes a text of 2,000,000 characters, more than 1,04"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% import 'os' as os %}", "no loader for this environment"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "is unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero"),
        ("{% for a in b %}" * 3000, "RecursionError: maximum recursion"),
        ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "RecursionError: maximum recursion"),
        ("{{ raise_exception('no\nway') }}", "no way"),
        ("{% set l = [0] %}{% for x in l %}{{ l.append(x) }}{% endfor %}", "more than 1 s"),
        ("{% set l = [0] %}{% for i in range(60) %}{{ l.extend(l) }}{% endfor %}", "256 MB of"),
        ("{% set l = [] %}{{ l.append(l) }}{{ l | tojson }}", "Circular reference"),
        ("{{ raise_exception('x' * 2000000) }}", "x" * 1000),
    ],
)
def test_a_template_that_takes_too_much_is_one_line(
    renderer: TemplateRenderer, source: str, says: str
) -> None:
    with pytest.raises(BadInput) as found:
        renderer.render_job(job(source, messages=[{"role": "user"}]))
    assert says in str(found.value) and "\n" not in str(found.value)
    assert len(str(found.value)) <= 1000
    assert renderer.render_job(job("{{ a }}, {{ strftime_now('%H') }}", a="b")) == "b, 12"


CHANGES = (
    "{% set l = [1] %}{{ l.append(2) }}{% macro f(a=[]) %}{{ a.append(1) }}{{ a }}{% endmacro %}"
    "{{ f() }}{{ l }}{{ messages.append(3) }}{{ messages[0].update(role='system') }}{{ messages }}"
    "{{ namespace.x }}{{ cycler.x }}{% set range = 3 %}{% set raise_exception = 4 %}"
    "{% set dict = {} %}{{ dict.update(a=1) }}{{ dict }}"
)


def test_what_a_template_changes_is_gone_with_its_job(renderer: TemplateRenderer) -> None:
    first = renderer.render_job(job(CHANGES, messages=[{"role": "user"}]))
    assert first.startswith("NoneNone[1][1, 2]None") and "system" in first
    assert renderer.render_job(job(CHANGES, messages=[{"role": "user"}])) == first
    later = "{{ range(2) | list }}{{ dict(a=1) }}{{ messages }}"
    assert renderer.render_job(job(later, messages=[])) == "[0, 1]{'a': 1}[]"


def test_a_process_that_is_gone_comes_back(renderer: TemplateRenderer) -> None:
    process = renderer.start_or_get_process()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(BadInput, match="the process that works on it ended with status -9"):
        renderer.render_job(job("a"))
    assert renderer.render_job(job("a")) == "a"


def test_an_answer_that_nobody_waited_for_is_not_the_next_one(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(line: bytes) -> bytes:
        exchange(line)
        raise KeyboardInterrupt

    exchange = renderer._exchange_lines
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "_exchange_lines", stopped)
        with pytest.raises(KeyboardInterrupt):
            renderer.render_job(job("first"))
    assert renderer.render_job(job("second")) == "second"


def test_threads_get_their_own_answers(renderer: TemplateRenderer) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = renderer.render_job(job("{{ n }}", n=number))
            time.sleep(0)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: str(n) for n in range(4)}


def test_variables_that_are_no_json() -> None:
    template = ChatTemplate("{{ messages }}", tokenizer("gpt-2"))
    with pytest.raises(BadInput, match="chat template: what it is given is no JSON: Object of typ"):
        template.render([{"role": "user", "content": "x"}], documents={1, 2})
