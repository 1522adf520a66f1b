"""What lies in a tokenizer's folder, looked at before a library opens it.

The libraries open by name what they find, and what their own configuration tells them to: it must
be files, and files below the roots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8core.errors import ModelUnavailable, SpecRefused
from fp8core.paths import is_below, resolve_roots

__all__ = ["CONFIG", "check_files", "read_config", "refuse_other_files"]

CONFIG = "tokenizer_config.json"
_MORE_TEMPLATES = "additional_chat_templates"
# What tokenizers are kept in, vocabularies and chat templates included.
_READ_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})


def check_files(folder: Path, roots: Sequence[str | os.PathLike[str]], pointer: str) -> None:
    """Raises for a folder in which a library would open what is no file, or outside ``roots``."""
    if not folder.is_dir():
        raise ModelUnavailable(f"{folder} is no folder with a tokenizer.json", pointer=pointer)
    allowed = resolve_roots(roots)
    for path in (*folder.iterdir(), *(folder / _MORE_TEMPLATES).glob("*")):
        if path.suffix not in _READ_SUFFIXES or not (path.is_symlink() or path.exists()):
            continue
        if not path.is_file():
            raise ModelUnavailable(f"{path.name} in {folder} is not a file", pointer=pointer)
        if allowed and not is_below(Path(os.path.realpath(path)), allowed):
            raise SpecRefused(
                f"{path.name} in {folder} is a link to a file outside the allowed roots",
                pointer=pointer,
            )
    refuse_other_files(read_config(folder), pointer)


def read_config(folder: Path) -> Any:
    """What tokenizer_config.json says; None where there is none, or no JSON in it."""
    try:
        return json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def refuse_other_files(config: Any, pointer: str) -> None:
    """Raises where a tokenizer_config.json names files that are not the folder's own.

    Of its keys transformers joins some to the folder, and hands others to the tokenizer's class,
    some of which take a text for the path of a vocabulary.
    """
    if not isinstance(config, dict):
        return
    versions = config.get("fast_tokenizer_files")
    listed = versions if isinstance(versions, list) else [versions]
    wrong = [name for name in listed if isinstance(name, str) and Path(name).name != name]
    if wrong:
        raise SpecRefused(
            f"fast_tokenizer_files in {CONFIG} names {wrong[0]!r}, which is not in its folder",
            pointer=pointer,
        )
    for key in ("init_inputs", "merges", "vocab"):
        value = config.get(key)
        if isinstance(value, str) or (key == "init_inputs" and value):
            raise SpecRefused(
                f"{key} in {CONFIG} could name any file of this machine; remove it", pointer=pointer
            )
