"""Chats: the tokenizer's template, and which tokens are the assistant's.

A template that marks the assistant's words with ``{% generation %}`` is believed. For any other,
each of the assistant's messages is found by rendering the chat once more with a mark in its place:
the mark's position is where the message begins, and putting the message back for the mark must give
the very same text. The targets are the message and the special token that ends its turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8core.data.template_work import TemplateWorkExceeded, counting_template, limited, rendering
from fp8core.data.tokenizers import Encoded, Tokenizer

__all__ = ["DEFAULT_TEMPLATE", "ChatTemplateError", "encode_chat"]

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '### ' ~ message['role'] ~ '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] ~ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
"""For tokenizers without a template: a line ``### role``, the text, end-of-text after answers."""

_GENERATION = re.compile(r"\{%-?\s*generation\b")
# Letters that no template touches and no chat contains.
_MARK = "\ue000octrain\ue001"

Message = dict[str, Any]


class ChatTemplateError(ValueError):
    """The template refuses the chat, or hides where the assistant's words are."""


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message]
) -> tuple[Encoded, NDArray[np.bool_]]:
    """The chat as tokens with offsets, and a mask [n] of the assistant's.

    Raises ``ChatTemplateError``.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ChatTemplateError("the tokenizer has no chat template")
    with limited(len(messages)):
        text, spans = _rendered(tokenizer, template, messages)
    encoded = tokenizer.encode_batch([text], offsets=True)[0]
    assert encoded.spans is not None
    mask = np.zeros(len(encoded.ids), dtype=bool)
    for start, stop in spans:
        mask |= (encoded.spans[:, 0] < stop) & (encoded.spans[:, 1] > start)
    if not mask.any():
        raise ChatTemplateError("the template renders nothing of the assistant's messages")
    return encoded, mask


def _rendered(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message]
) -> tuple[str, list[tuple[int, int]]]:
    """The chat as text, and where the assistant's words are in it."""
    if _GENERATION.search(template):
        return _render_with_spans(tokenizer, template, messages)
    text = _render(tokenizer, template, messages)
    return text, [
        _message_span(tokenizer, template, messages, index, text)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


@contextmanager
def _bounded(tokenizer: Tokenizer, template: str) -> Iterator[str]:
    """One rendering: its work is bounded, and whatever it raises is ``ChatTemplateError``.

    Yields what transformers is to be given for the template.
    """
    try:
        name = counting_template(template)
        with rendering():
            yield name
    except TemplateWorkExceeded as error:
        name = tokenizer.hugging_face.name_or_path
        raise ChatTemplateError(
            f"the chat template of the tokenizer{f' {name!r}' if name else ''} does not come to an "
            f"end: {error}; give the tokenizer another template"
        ) from error
    except Exception as error:
        # Templates are programs: they raise by themselves, and fail in every other way.
        raise ChatTemplateError(f"the chat template refuses it: {error}") from error


def _render(tokenizer: Tokenizer, template: str, messages: Sequence[Message]) -> str:
    with _bounded(tokenizer, template) as name:
        text = tokenizer.hugging_face.apply_chat_template(
            list(messages), chat_template=name, tokenize=False
        )
    return str(text)


def _render_with_spans(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message]
) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    with _bounded(tokenizer, template) as name:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=name,
            return_assistant_tokens_mask=True,
            **tokenizer.hugging_face.special_tokens_map,
        )
    return str(texts[0]), [(int(start), int(stop)) for start, stop in spans[0]]


def _message_span(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message], index: int, text: str
) -> tuple[int, int]:
    marked = list(messages)
    marked[index] = {**messages[index], "content": _MARK}
    around = _render(tokenizer, template, marked).split(_MARK)
    content = messages[index]["content"]
    for shown in (content, content.strip()):
        if len(around) == 2 and text == around[0] + shown + around[1]:
            start = len(around[0])
            stop = start + len(shown)
            return start, stop + _end_of_turn(tokenizer, text[stop:])
    raise ChatTemplateError(
        f"the chat template changes message {index + 1}, so that the assistant's tokens cannot be "
        "told apart; use a template with {% generation %} blocks"
    )


def _end_of_turn(tokenizer: Tokenizer, following: str) -> int:
    """Length of the special token that follows, and of white space before it."""
    space = len(following) - len(following.lstrip())
    specials = tokenizer.special_tokens
    found = [token for token in specials if following.startswith(token, space)]
    return space + len(max(found, key=len)) if found else 0
