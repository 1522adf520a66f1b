"""Tokenizers of others: what their files name, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8core.data.dataset import open_dataset
from fp8core.data.tokenizer_build import byte_tokenizer
from fp8core.data.tokenizers import load_tokenizer
from fp8core.errors import DataInvalid, ModelUnavailable, SpecRefused

Spec = Callable[..., Any]
CLASSIFY, SEPARATE = "[CLS]", "[SEP]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer below the root, and beside the root a file that is nobody's business."""
    place = tmp_path / "root" / "words"
    byte_tokenizer().save_pretrained(place)
    byte_tokenizer().save_pretrained(tmp_path / "outside")
    (tmp_path / "outside/tokenizer.json").rename(tmp_path / "outside/tokenizer.4.0.0.json")
    (tmp_path / "outside/secret.txt").write_text("root:x:0\nhalt:*:1\n")
    return place


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def open_words(make_spec: Spec, folder: Path) -> Any:
    spec = make_spec(tokenizer={"source": "path", "path": str(folder)})
    return load_tokenizer(spec, roots=[folder.parent])


@pytest.mark.parametrize(
    "values",
    [
        {"fast_tokenizer_files": ["../../outside/tokenizer.4.0.0.json"]},
        {"tokenizer_class": "BertTokenizer", "init_inputs": ["{outside}/secret.txt"]},
        {"tokenizer_class": "BertTokenizer", "vocab": "{outside}/secret.txt"},
        {"tokenizer_class": "GPT2Tokenizer", "merges": "{outside}/secret.txt"},
    ],
)
def test_its_configuration_names_no_file_elsewhere(
    folder: Path, make_spec: Spec, values: dict[str, Any]
) -> None:
    outside = str(folder.parent.parent / "outside")
    text = json.dumps(values).replace("{outside}", outside)
    changed(folder / "tokenizer_config.json", **json.loads(text))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpecRefused, match=r"in tokenizer_config\.json") as raised:
        open_words(make_spec, folder)
    assert raised.value.pointer == "/tokenizer/path"


def test_a_named_vocabulary_file_is_not_opened(folder: Path, make_spec: Spec) -> None:
    secret = folder.parent.parent / "outside/secret.txt"
    changed(
        folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", vocab_file=str(secret)
    )
    (folder / "tokenizer.json").unlink()
    tokenizer = open_words(make_spec, folder)
    assert "root:x:0" not in tokenizer.hugging_face.get_vocab()


@pytest.mark.parametrize("folder_too", [False, True])
def test_a_template_beside_the_others_is_no_link_out(
    folder: Path, make_spec: Spec, folder_too: bool
) -> None:
    outside = folder.parent.parent / "outside"
    (outside / "tool.jinja").write_text("secret")
    templates = folder / "additional_chat_templates"
    if folder_too:
        templates.symlink_to(outside)
    else:
        templates.mkdir()
        (templates / "tool.jinja").symlink_to(outside / "tool.jinja")
    with pytest.raises(SpecRefused, match="outside the allowed roots"):
        open_words(make_spec, folder)


def word(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True, **flags}


def of_dna(template: dict[str, list[int]]) -> dict[str, Any]:
    """Four letters, no unknown token, and what stands around a text by name and ids."""
    named = {name: {"id": name, "ids": ids, "tokens": [name]} for name, ids in template.items()}
    first, last = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (CLASSIFY, SEPARATE)]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "model": {
            "type": "WordLevel",
            "unk_token": "?",
            "vocab": {w: i for i, w in enumerate("ACGT")},
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "added_tokens": [word(4, CLASSIFY), word(5, SEPARATE)],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, text, last],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": named,
        },
    }


def test_a_vocabulary_without_an_a_keeps_its_template(folder: Path, make_spec: Spec) -> None:
    changed(folder / "tokenizer.json", **of_dna({CLASSIFY: [4], SEPARATE: [5]}))
    tokenizer = open_words(make_spec, folder)
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((4,), (5,))
    assert tokenizer.encode("GAT") == [2, 0, 3]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({CLASSIFY: [4], SEPARATE: [99]}, "adds the token id 99, which is none of its"),
        ({CLASSIFY: [4]}, "the tokenizers library failed"),
    ],
)
def test_a_template_of_tokens_that_are_none_is_refused(
    folder: Path, make_spec: Spec, template: dict[str, list[int]], words: str
) -> None:
    changed(folder / "tokenizer.json", **of_dna(template))
    with pytest.raises(ModelUnavailable, match=words):
        open_words(make_spec, folder)


def test_numbers_of_no_vocabulary_are_refused_before_anybody_counts_to_them(
    folder: Path, make_spec: Spec
) -> None:
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    model["vocab"]["zz"] = 4_000_000_000
    changed(path, model=model)
    with pytest.raises(ModelUnavailable, match="has the token id 4000000000"):
        open_words(make_spec, folder)


@pytest.mark.parametrize("kind", [["TokenizersBackend"], {}, 5])
def test_a_class_that_is_no_name_is_refused(folder: Path, make_spec: Spec, kind: Any) -> None:
    changed(folder / "tokenizer_config.json", tokenizer_class=kind)
    with pytest.raises(ModelUnavailable, match="no usable tokenizer"):
        open_words(make_spec, folder)


def test_a_template_that_is_no_text_is_refused(folder: Path, make_spec: Spec) -> None:
    changed(folder / "tokenizer_config.json", chat_template=5)
    with pytest.raises(ModelUnavailable, match="chat_template is no text"):
        open_words(make_spec, folder)


@pytest.mark.parametrize("kind", ["text", "prompt_completion", "chat"])
def test_a_text_without_tokens_is_named_with_its_line(
    folder: Path, make_spec: Spec, write_jsonl: Callable[..., Path], kind: str
) -> None:
    changed(folder / "tokenizer.json", **of_dna({CLASSIFY: [4], SEPARATE: [5]}))
    tokenizer = open_words(make_spec, folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = [
        {
            "text": text,
            "prompt": "A",
            "completion": text,
            "messages": [{"role": "assistant", "content": text}],
        }
        for text in ("GATTACA", "CAT", "DOG", "TAG")
    ]
    path = write_jsonl(rows)
    data = {"source": "jsonl", "path": str(path), "format": kind, "shuffle": False}
    spec = make_spec(
        data=data | {"append_end_of_text": False},
        evaluation={"fraction": 0.0},
        training={"sequence_length": 4},
    )
    with pytest.raises(DataInvalid, match=r"data\.jsonl, line 3: the tokenizer refuses it: "):
        list(zip(range(9), open_dataset(spec, tokenizer).train, strict=False))
