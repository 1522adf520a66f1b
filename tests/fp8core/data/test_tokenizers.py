"""Tokenizers made here and loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fp8core.data import tokenizers
from fp8core.data.tokenizer_build import byte_tokenizer, train_tokenizer
from fp8core.data.tokenizers import Tokenizer, load_tokenizer
from fp8core.errors import ModelUnavailable, SpecRefused

Spec = Callable[..., Any]
BYTES = Tokenizer(byte_tokenizer())
TEXTS = ["the cat sat on the mat, the cat ate the rat", "naïve 𝄞 café\n\tdef f(x):\n"] * 20


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200).filter(lambda text: "<|" not in text))
def test_bytes_are_the_bytes(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


def test_the_byte_vocabulary_is_a_multiple_of_16() -> None:
    assert BYTES.vocab_size == 272
    assert (BYTES.eos_id, BYTES.pad_id, BYTES.mask_id) == (256, 257, 258)
    assert BYTES.special_ids == frozenset(range(256, 272))
    assert (BYTES.prefix_ids, BYTES.suffix_ids) == ((), ())
    encoder = Tokenizer(byte_tokenizer(encoder=True))
    assert (encoder.prefix_ids, encoder.suffix_ids) == ((259,), (256,))


@pytest.mark.parametrize("model_type", [None, "llama", "bert", "gpt2", "qwen2"])
@pytest.mark.parametrize("kind", ["bytes", "train"])
def test_saved_tokenizers_load_beside_any_model(
    tmp_path: Path, make_spec: Spec, kind: str, model_type: str | None
) -> None:
    built = byte_tokenizer() if kind == "bytes" else train_tokenizer(TEXTS, 320)
    tokenizer = Tokenizer(built)
    tokenizer.save(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    spec = make_spec(tokenizer={"source": "path", "path": str(tmp_path)})
    loaded = load_tokenizer(spec)
    text = "the cat naïve e\u0301 12345 𝄞  \n\t x"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.eos_id, loaded.pad_id, loaded.mask_id, loaded.vocab_size) == (
        tokenizer.eos_id,
        tokenizer.pad_id,
        tokenizer.mask_id,
        tokenizer.vocab_size,
    )
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert len(auto) == tokenizer.vocab_size
    assert auto.eos_token_id == tokenizer.eos_id
    if model_type != "qwen2":  # AutoTokenizer puts that type's own class in its place
        assert auto(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)


def test_training_gives_the_size_asked_for_and_every_byte() -> None:
    tokenizer = Tokenizer(train_tokenizer(TEXTS, 300))
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_id == 0
    text = "".join(map(chr, range(32, 300))) + "\x00\x01 unseen 漢字"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the cat sat")) < 8
    # Far more tokens than these texts have pairs for: reserved ones fill up.
    filled = Tokenizer(train_tokenizer(["ab"], 512))
    assert filled.vocab_size == 512
    assert len(filled.special_ids) == 4 + (512 - 4 - 256 - 1)


def test_training_is_the_same_in_every_process() -> None:
    program = (
        "from pydoc_data.topics import topics\n"
        "from fp8core.data.tokenizer_build import train_tokenizer\n"
        "from fp8core.data.tokenizers import Tokenizer\n"
        "texts = [topics[name] for name in sorted(topics)][:40]\n"
        "print(Tokenizer(train_tokenizer(texts, 1024)).fingerprint)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, threads in (("0", "1"), ("1", "2"))
    ]
    found = {process.communicate()[0].strip() for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(found) == 1


@pytest.mark.parametrize("text", ["plain ascii text", "naïve 𝄞 café — ok", "", "  leading"])
def test_byte_lengths_add_up_to_the_text(text: str) -> None:
    trained = Tokenizer(train_tokenizer(TEXTS, 300))
    for tokenizer in (BYTES, trained):
        encoded = tokenizer.encode_batch([text], offsets=True)[0]
        assert encoded.ids.tolist() == tokenizer.encode(text)
        assert encoded.byte_lengths is not None
        assert encoded.byte_lengths.sum() == len(text.encode())
        assert encoded.byte_lengths.dtype == np.int32


def word_piece(tmp_path: Path) -> Path:
    """A BERT-like tokenizer whose file asks for truncation and padding."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"]
    backend = Backend(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_s_own_tokenizer_neither_cuts_nor_pads(tmp_path: Path, make_spec: Spec) -> None:
    word_piece(tmp_path)
    spec = make_spec(model={"source": "path", "path": str(tmp_path)}, tokenizer="model")
    tokenizer = load_tokenizer(spec)
    assert tokenizer.encode("hello worlds " * 10) == [5, 6, 7] * 10
    assert tokenizer.encode("hello") == [5]
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == ((2,), (3,))
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.eos_id) == (0, 4, 3)
    encoded = tokenizer.encode_batch(["Hello  worlds"], offsets=True)[0]
    assert encoded.byte_lengths is not None
    assert encoded.byte_lengths.tolist() == [5, 7, 1]
    # What the file asks for is still there in what is saved.
    tokenizer.save(tmp_path / "again")
    assert Backend.from_file(str(tmp_path / "again" / "tokenizer.json")).truncation is not None


def test_missing_and_broken_tokenizers(tmp_path: Path, make_spec: Spec) -> None:
    spec = make_spec(tokenizer={"source": "path", "path": str(tmp_path / "none")})
    with pytest.raises(ModelUnavailable, match="no such file or folder") as raised:
        load_tokenizer(spec)
    assert raised.value.pointer == "/tokenizer/path"
    (tmp_path / "empty").mkdir()
    spec = make_spec(tokenizer={"source": "path", "path": str(tmp_path / "empty")})
    with pytest.raises(ModelUnavailable, match="no usable tokenizer"):
        load_tokenizer(spec)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    (broken / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    spec = make_spec(tokenizer={"source": "path", "path": str(broken)})
    with pytest.raises(ModelUnavailable, match="no usable tokenizer"):
        load_tokenizer(spec)
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(SpecRefused, match="outside the allowed roots"):
        load_tokenizer(spec, roots=[root])


def test_hub_ids_offline(tmp_path: Path, make_spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = make_spec(tokenizer={"source": "huggingface", "id": "no/where"})
    with pytest.raises(ModelUnavailable, match="no usable tokenizer in no/where") as raised:
        load_tokenizer(spec)
    assert raised.value.pointer == "/tokenizer/id"
    folder = tmp_path / "secret"
    folder.mkdir()
    word_piece(folder)
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = make_spec(tokenizer={"source": "huggingface", "id": "secret"})
    with pytest.raises(SpecRefused, match="outside the roots"):
        load_tokenizer(spec, roots=[tmp_path / "root"])
    assert load_tokenizer(spec, roots=[tmp_path]).vocab_size == 8


def test_long_texts_are_taken_over_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    texts = ["", "a", "é" * 6, "abcdefghijk"]
    whole = [tokenizer.encode_batch(texts, offsets=offsets) for offsets in (False, True)]
    monkeypatch.setattr(tokenizers, "_AT_ONCE", 3)
    for expected, offsets in zip(whole, (False, True), strict=True):
        for one, other in zip(
            tokenizer.encode_batch(texts, offsets=offsets), expected, strict=True
        ):
            for field in ("ids", "spans", "byte_lengths"):
                found, wanted = getattr(one, field), getattr(other, field)
                assert (found is None) == (wanted is None)
                if wanted is not None:
                    assert found.dtype == wanted.dtype
                    assert found.tolist() == wanted.tolist()
