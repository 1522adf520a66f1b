"""Which tokens of a chat are the assistant's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8core.data.chat import DEFAULT_TEMPLATE, ChatTemplateError, encode_chat
from fp8core.data.formats import ExampleEncoder
from fp8core.data.records import Record
from fp8core.data.tokenizer_build import byte_tokenizer
from fp8core.data.tokenizers import Tokenizer
from fp8core.errors import DataInvalid

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}"
)
# As reasoning models do: only the last answer gets a place for thoughts.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'].strip() + '<|im_end|>\n' }}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": "assistant é"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": " No.\n"},
]


def tokenizer_with(template: str | None, *special: str) -> Tokenizer:
    built: Any = byte_tokenizer()
    built.add_special_tokens({"additional_special_tokens": list(special)} if special else {})
    tokenizer = Tokenizer(built)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def targets(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The runs of target tokens as text."""
    encoded, mask = encode_chat(tokenizer, messages)
    runs: list[list[int]] = []
    for index, (token, chosen) in enumerate(zip(encoded.ids.tolist(), mask, strict=True)):
        if chosen:
            if index == 0 or not mask[index - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_answers_and_their_end_are_the_targets() -> None:
    tokenizer = tokenizer_with(CHATML, "<|im_start|>", "<|im_end|>")
    assert targets(tokenizer, CHAT) == ["assistant é<|im_end|>", " No.\n<|im_end|>"]
    encoded, _ = encode_chat(tokenizer, CHAT)
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nassistant<|im_end|>\n"
    assert tokenizer.decode(encoded.ids).startswith(start)


def test_a_template_that_treats_the_last_answer_apart() -> None:
    tokenizer = tokenizer_with(THINKING, "<|im_start|>", "<|im_end|>")
    assert targets(tokenizer, CHAT) == ["assistant é<|im_end|>", "No.<|im_end|>"]


def test_generation_blocks_are_believed() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'A: ' }}"
        "{%- generation %}{{ m['content'] | upper }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    assert targets(tokenizer_with(template), CHAT) == ["ASSISTANT É", " NO.\n"]


def test_the_default_template_ends_answers_and_is_saved(tmp_path: Any) -> None:
    tokenizer = tokenizer_with(None)
    ExampleEncoder(tokenizer, "chat", task="causal_lm", append_end_of_text=True, limit=64)
    assert tokenizer.chat_template == DEFAULT_TEMPLATE
    assert targets(tokenizer, CHAT) == ["assistant é<|endoftext|>", " No.\n<|endoftext|>"]
    rendered = tokenizer.hugging_face.apply_chat_template(
        CHAT[:2], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "### system\nBe brief.\n### user\nassistant\n### assistant\n"
    tokenizer.save(tmp_path)
    assert "### " in (tmp_path / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "changes message 3"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "message 3"),
        ("{{ messages[0].nothing.more }}", "refuses it"),
    ],
)
def test_templates_that_refuse_or_hide_the_answers(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        encode_chat(tokenizer_with(template), CHAT)


def test_the_error_names_the_line() -> None:
    tokenizer = tokenizer_with("{{ raise_exception('no system role') }}")
    encoder = ExampleEncoder(tokenizer, "chat", task="causal_lm", append_end_of_text=True, limit=64)
    with pytest.raises(DataInvalid, match=r"x\.jsonl, line 5: .*no system role"):
        encoder.encode([Record({"messages": CHAT})], lambda index: f"x.jsonl, line {index + 5}")


def test_bytes_of_the_targets_are_those_of_the_answers() -> None:
    tokenizer = tokenizer_with(CHATML, "<|im_start|>", "<|im_end|>")
    encoded, mask = encode_chat(tokenizer, CHAT)
    assert encoded.byte_lengths is not None
    answers = "assistant é<|im_end|> No.\n<|im_end|>"
    assert int(encoded.byte_lengths[np.asarray(mask)].sum()) == len(answers.encode())
