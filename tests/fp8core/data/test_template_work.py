"""Templates whose work has no end are refused; those whose work has one render as before."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fp8core.data import template_work
from fp8core.data.chat import ChatTemplateError, encode_chat
from fp8core.data.formats import ExampleEncoder
from fp8core.data.records import Record
from fp8core.data.template_work import counting_template, rendering
from fp8core.errors import DataInvalid
from tests.fp8core.data.test_chat import CHAT, CHATML, THINKING, tokenizer_with

GROWING = "{%% set n = namespace(x=%s) %%}{%% for a in range(60) %%}%s{%% endfor %%}{{ n.x }}"
ENDLESS = {
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops that pass over all": "{% for a in range(100000) %}{% for b in range(100000) if false %}"
    "{% endfor %}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "filters": "{% for a in range(100000) %}{{ range(100000) | sum }}{% endfor %}",
    "looking": "{% set x = range(100000) | list %}{% for a in range(100000) %}{{ -1 in x }}"
    "{% endfor %}",
    "tilde": GROWING % ("'ab'", "{% set n.x = n.x ~ n.x %}"),
    "plus": GROWING % ("'ab'", "{% set n.x = n.x + n.x %}"),
    "lists": GROWING % ("[1]", "{% set n.x = n.x + n.x %}"),
    "block": GROWING % ("'ab'", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
    "squares": GROWING % ("9", "{% set n.x = n.x * n.x %}"),
    "replace": GROWING % ("'aa'", "{% set n.x = n.x.replace('a', n.x) %}"),
    "replace filter": GROWING % ("'aa'", "{% set n.x = n.x | replace('a', n.x) %}"),
    "join": GROWING % ("'aa'", "{% set n.x = n.x.join(n.x | list) %}"),
    "join filter": GROWING % ("'aa'", "{% set n.x = n.x | list | join(n.x) %}"),
    "power": "{{ 9 ** (9 ** 9) }}",
    "times": "{{ 'x' * 10000000000 }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "slices": "{{ [1] | slice(10000000000) | list }}",
}
# What templates use: each must give what transformers alone makes of it.
PLAIN = [
    CHATML,
    THINKING,
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.nextitem is defined }} "
    "{{ loop.last }} {{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}"
    "{% endfor %}",
    "{% for t in [[1, [2]], [3]] recursive %}{{ t if t is number else loop(t) }}{% endfor %}",
    "{% macro m(a, b=2) %}{{ a ~ b }}{{ caller() if caller else '' }}{{ varargs }}{% endmacro %}"
    "{{ m(1) }}{% call m(3, 4, 5) %}x{% endcall %}",
    "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}"
    "{{ n.i }}",
    "{{ messages | tojson(indent=2) }}{{ messages | map(attribute='role') | join(', ') }}",
    "{{ [1, 2] + [3] }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ '%s-%03d' % ('a', 7) }}{{ 7 % 4 }}",
    "{{ 1.5 * 2 }}{{ '{:>5}'.format('a') }}{{ 'a b'.split() }}{{ 'x' | center(9) }}",
    "{{ 'a-b' | replace('-', '+') }}{% set x %}{{ messages[0].content | trim | upper }}{% endset %}"
    "{{ x | length }}",
    "{{ none_such | default('d') }}{{ 'a' in 'abc' }}{{ 'z' not in messages[0] }}",
    "{% filter upper %}{% for m in messages %}{{ m.role }}{% endfor %}{% endfilter %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS.values(), ids=list(ENDLESS))
def test_work_without_end_is_refused_within_seconds(template: str) -> None:
    tokenizer = tokenizer_with("first line\n" + template)
    tokenizer.hugging_face.name_or_path = "some/tokenizer"
    began = time.thread_time()
    with pytest.raises(ChatTemplateError, match=r"'some/tokenizer'.*does not come to an end"):
        encode_chat(tokenizer, CHAT)
    assert time.thread_time() - began < 12


def test_the_limit_on_time_holds_for_slow_work_and_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_work, "MOST_SECONDS", 0.5)
    # What is rendered so far is put together at each of these.
    template = (
        "{% for a in range(100000) %}{{ messages[0].content }}{% generation %}x{% endgeneration %}"
        "{% endfor %}"
    )
    said: list[str] = []

    def encode() -> None:
        try:
            encode_chat(tokenizer_with(template), CHAT)
        except ChatTemplateError as error:
            said.append(str(error))

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join(60)
    assert len(said) == 1
    assert "takes more than" in said[0]


def test_the_row_and_the_line_of_the_template_are_named() -> None:
    when = "{% if messages[0].content == 'bad' %}\n"
    tokenizer = tokenizer_with(when + ENDLESS["loops"] + "{% endif %}" + CHATML)
    encoder = ExampleEncoder(tokenizer, "chat", task="causal_lm", append_end_of_text=True, limit=64)
    good = Record({"messages": CHAT})
    bad = Record({"messages": [{"role": "user", "content": "bad"}, *CHAT[1:]]})
    assert len(encoder.encode([good], str)) == 1
    with pytest.raises(DataInvalid, match=r"row 1.*does not come to an end.*its line 2"):
        encoder.encode([good, bad], lambda index: f"row {index}")
    # Nothing is left of it.
    assert len(encoder.encode([good], str)) == 1


@pytest.mark.parametrize("template", PLAIN)
def test_what_ends_renders_as_transformers_renders_it(template: str) -> None:
    built: Any = tokenizer_with(template).hugging_face
    wanted = built.apply_chat_template(CHAT, tokenize=False)
    name = counting_template(template)
    with rendering():
        assert built.apply_chat_template(CHAT, chat_template=name, tokenize=False) == wanted
    # Outside nothing is counted, and the same is rendered.
    assert built.apply_chat_template(CHAT, chat_template=name, tokenize=False) == wanted


def test_a_long_chat_is_well_within_the_limits() -> None:
    messages = [
        {"role": role, "content": f"{number} {'word ' * 200}"}
        for number in range(500)
        for role in ("user", "assistant")
    ]
    began = time.thread_time()
    _, mask = encode_chat(tokenizer_with(CHATML, "<|im_start|>", "<|im_end|>"), messages)
    assert mask.any()
    assert time.thread_time() - began < template_work.MOST_SECONDS
