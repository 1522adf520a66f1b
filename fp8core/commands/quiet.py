"""Bars and warnings of other libraries kept out of a log that people and programs read."""

from __future__ import annotations

import os

__all__ = ["quieten_libraries"]


def quieten_libraries() -> None:
    """No progress bars, no advice; errors still come as exceptions."""
    # Read when the library is imported, which for most runs is never.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
