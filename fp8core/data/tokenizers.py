"""Tokenizers: from a spec to one small interface over a fast Hugging Face tokenizer."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from fp8core.data.tokenizer_build import byte_tokenizer, train_tokenizer
from fp8core.data.tokenizer_files import CONFIG, check_files, read_config, refuse_other_files
from fp8core.errors import ModelUnavailable, SpecRefused, TrainingError
from fp8core.paths import resolve_path

__all__ = ["Encoded", "Tokenizer", "TokenizerFailure", "load_tokenizer"]

# These classes take tokenizer.json as it is; for some model types AutoTokenizer would put another
# class in their place that normalises and splits text in its own way.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Of no vocabulary; the library walks through all numbers up to the largest.
_LARGEST_ID = 2**24
# So many of a vocabulary are tried for one that is a text by itself.
_MOST_WORDS = 1000
# numpy lets no other thread run while it reads a list, which of tens of millions takes seconds.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Encoded:
    """A text as tokens: ``ids`` [n] int32; with offsets asked for, ``spans`` [n, 2] int64 are the
    characters [start, stop) of each token and ``byte_lengths`` [n] int32 the UTF-8 bytes of text
    that each adds (0 for special tokens that stand for no text).
    """

    ids: NDArray[np.int32]
    spans: NDArray[np.int64] | None = None
    byte_lengths: NDArray[np.int32] | None = None


class TokenizerFailure(ValueError):
    """The tokenizer cannot encode a text: it has no token for some of it, or is damaged."""


class Tokenizer:
    """Encoding, special tokens and saving; never truncates, never pads."""

    def __init__(self, hugging_face: PreTrainedTokenizerFast) -> None:
        self.hugging_face: Any = hugging_face
        # A copy: truncation and padding that the file asks for (sentence encoders do) would cut
        # texts silently, and switching them off in the original would change what is saved.
        vocabulary = hugging_face.backend_tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ModelUnavailable("the tokenizer has no tokens", pointer="/tokenizer")
        self.vocab_size: int = max(len(vocabulary), max(vocabulary.values()) + 1)
        if self.vocab_size > _LARGEST_ID:
            raise ModelUnavailable(
                f"the tokenizer has the token id {self.vocab_size - 1}, which is none",
                pointer="/tokenizer",
            )
        self._backend = Backend.from_str(hugging_face.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_id: int | None = _first(hugging_face.eos_token_id, hugging_face.sep_token_id)
        self.pad_id: int = _first(hugging_face.pad_token_id, self.eos_id, 0) or 0
        self.mask_id: int | None = hugging_face.mask_token_id
        special = {
            number: token.content
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_ids = frozenset(special) | frozenset(hugging_face.all_special_ids)
        self.special_tokens = frozenset(special.values())
        ordinary = [token for token in vocabulary if token not in self.special_tokens]
        self.prefix_ids, self.suffix_ids = self._template_ids(ordinary)
        beyond = [n for n in (*self.prefix_ids, *self.suffix_ids) if n >= self.vocab_size]
        if beyond:
            raise ModelUnavailable(
                f"the tokenizer's template adds the token id {beyond[0]}, which is none of its "
                f"{self.vocab_size}",
                pointer="/tokenizer",
            )

    @property
    def fingerprint(self) -> str:
        """Changes when the same text would become other tokens."""
        text = self._backend.to_str() + str(self.chat_template)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of chats; None where the tokenizer has none."""
        template = self.hugging_face.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        self.hugging_face.chat_template = template

    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone, without begin and end tokens.

        Raises ``TokenizerFailure``.
        """
        with _failures():
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], *, offsets: bool = False) -> list[Encoded]:
        """Like ``encode``, on all cores; ``offsets`` asks for spans and byte lengths."""
        with _failures():
            encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
            encodings = encode(list(texts), add_special_tokens=False)
        if not offsets:
            return [Encoded(_ids(encoding.ids)) for encoding in encodings]
        return [
            _with_offsets(text, encoding.ids, encoding.offsets)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and its configuration, as ``AutoTokenizer`` loads them."""
        self.hugging_face.save_pretrained(os.fspath(folder))

    def _template_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer's own template puts before and behind a text.

        Seen at one that has tokens: not every vocabulary has an "a".
        """
        for text in ("a", *words[:_MOST_WORDS]):
            with contextlib.suppress(TokenizerFailure):
                bare = self.encode(text)
                if bare:
                    break
        else:
            return (), ()
        with _failures():
            full = self._backend.encode(text, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start]), tuple(full[start + len(bare) :])
        return (), ()


def load_tokenizer(
    spec: Any,
    *,
    model_folder: str | os.PathLike[str] | None = None,
    texts: Iterable[str] | None = None,
    roots: Sequence[str | os.PathLike[str]] = (),
    base_folder: str | os.PathLike[str] | None = None,
) -> Tokenizer:
    """The tokenizer that ``spec`` (a ``JobSpec``) asks for.

    ``model_folder`` is the model's local checkpoint folder where there is one (needed for a model
    of another job). ``texts`` are what ``train`` learns from (``Corpus.sample_texts``); nothing
    else reads them.

    Raises ``ModelUnavailable`` when there is no usable tokenizer, ``SpecRefused`` for a path
    outside ``roots``.
    """
    wanted = spec.tokenizer
    encoder = spec.task != "causal_lm"
    if wanted.source == "bytes":
        return Tokenizer(byte_tokenizer(encoder=encoder))
    if wanted.source == "train":
        if texts is None:
            raise ValueError("a tokenizer is to be trained, but no texts were given")
        return Tokenizer(train_tokenizer(texts, wanted.vocab_size, encoder=encoder))
    if wanted.source == "path":
        folder = resolve_path(
            wanted.path, roots, base_folder, pointer="/tokenizer/path", missing=ModelUnavailable
        )
        check_files(folder, roots, "/tokenizer/path")
        return _load(str(folder), None, "/tokenizer/path")
    if wanted.source == "huggingface":
        return _load_hub(wanted.id, wanted.revision, roots, base_folder, "/tokenizer/id")
    model = spec.model
    if model_folder is not None:
        check_files(Path(model_folder), roots if model.source == "path" else (), "/tokenizer")
        return _load(os.fspath(model_folder), None, "/tokenizer")
    if model.source == "path":
        folder = resolve_path(
            model.path, roots, base_folder, pointer="/model/path", missing=ModelUnavailable
        )
        check_files(folder, roots, "/tokenizer")
        return _load(str(folder), None, "/tokenizer")
    if model.source == "huggingface":
        return _load_hub(model.id, model.revision, roots, base_folder, "/tokenizer")
    raise ModelUnavailable(
        "the model brings no tokenizer: ask for bytes, train, a path or a hub id",
        pointer="/tokenizer",
    )


def _load_hub(
    id: str,
    revision: str | None,
    roots: Sequence[str | os.PathLike[str]],
    base_folder: str | os.PathLike[str] | None,
    pointer: str,
) -> Tokenizer:
    # The library takes a folder of that name in the working directory before the hub: only one
    # that the roots allow may be meant.
    try:
        folder = resolve_path(id, roots, base_folder, pointer=pointer, missing=ModelUnavailable)
    except ModelUnavailable:
        if Path(id).exists():
            raise SpecRefused(
                f"{id!r} names a file or folder outside the roots", pointer=pointer
            ) from None
        return _load(id, revision, pointer)
    check_files(folder, roots, pointer)
    return _load(str(folder), None, pointer)


def _load(place: str, revision: str | None, pointer: str) -> Tokenizer:
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    loader: Any = PreTrainedTokenizerFast if _is_plain(Path(place)) else AutoTokenizer
    try:
        if not Path(place).is_dir():
            _check_config_of_hub(place, options, pointer)
        with _no_panic():
            loaded = loader.from_pretrained(place, trust_remote_code=False, **options)
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ModelUnavailable(
                f"the tokenizer in {place} is a {type(loaded).__name__} without a tokenizer.json; "
                "only tokenizers of the tokenizers library are supported",
                pointer=pointer,
            )
        for how_it_was_loaded in ("is_local", "local_files_only"):
            # The library would save these with the tokenizer.
            loaded.init_kwargs.pop(how_it_was_loaded, None)
        tokenizer = Tokenizer(loaded)
        if not isinstance(tokenizer.chat_template, str | None):
            raise TypeError("its chat_template is no text")
        return tokenizer
    except TrainingError:
        raise
    except Exception as error:
        # The library raises many kinds for a missing, damaged or unsupported tokenizer.
        reason = (str(error).splitlines() or [""])[0]
        if not reason or isinstance(error, KeyError | AttributeError | TypeError | RecursionError):
            reason = f"its files are damaged ({type(error).__name__}: {reason})"
        message = f"no usable tokenizer in {place}: {reason}"
        raise ModelUnavailable(message, pointer=pointer) from error


def _check_config_of_hub(id: str, options: dict[str, Any], pointer: str) -> None:
    found = cached_file(id, CONFIG, _raise_exceptions_for_missing_entries=False, **options)
    if found is not None:
        refuse_other_files(read_config(Path(found).parent), pointer)


def _is_plain(folder: Path) -> bool:
    config = read_config(folder)
    return (
        isinstance(config, dict)
        and config.get("tokenizer_class") in _PLAIN_CLASSES
        and (folder / "tokenizer.json").is_file()
    )


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """The library raises bare ``Exception``s."""
    try:
        with _no_panic():
            yield
    except Exception as error:
        raise TokenizerFailure(str(error)) from error


@contextlib.contextmanager
def _no_panic() -> Iterator[None]:
    """The tokenizers library is written in Rust, whose panics are no ``Exception``."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"the tokenizers library failed: {error}") from error


def _with_offsets(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
    spans = np.concatenate(
        [np.array(part, dtype=np.int64).reshape(-1, 2) for part in _parts(offsets)]
    )
    # Ends never go back, and where several tokens share a character the first one gets its bytes.
    ends = np.maximum.accumulate(spans[:, 1]) if len(spans) else spans[:, 1]
    if not text.isascii():
        ends = utf8_offsets(text)[ends]
    lengths = np.diff(ends, prepend=0).astype(np.int32)
    return Encoded(_ids(ids), spans, lengths)


def _ids(ids: list[int]) -> NDArray[np.int32]:
    return np.concatenate([np.array(part, dtype=np.int32) for part in _parts(ids)])


def _parts(values: list[Any]) -> list[list[Any]]:
    """In their order, at least one."""
    if len(values) <= _AT_ONCE:
        return [values]
    return [values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE)]


def utf8_offsets(text: str) -> NDArray[np.int64]:
    """The byte offset of every character of ``text`` in UTF-8, and of its end: [len + 1]."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate(([0], np.cumsum(widths, dtype=np.int64)))


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
