"""Where the files of a data set lie in the artifact store: below a folder of its owner's own."""

import hashlib
import secrets

from octrain_api.datasets.schemas import SUFFIXES
from octrain_api.models import Dataset


def folder_url(artifact_url: str, dataset: Dataset) -> str:
    """The folder of one data set.

    Owners have any name; its digest is a name that every store takes, and nobody else's.
    """
    owner = hashlib.sha256(dataset.owner.encode()).hexdigest()[:32]
    return f"{artifact_url.rstrip('/')}/owners/{owner}/datasets/{dataset.id}"


def content_name(dataset: Dataset) -> str:
    """The file of the whole content in that folder."""
    return f"data{SUFFIXES[dataset.media]}"


def new_part_name(first_byte: int) -> str:
    """A name for a part that begins there; two senders of the same part write two files."""
    return f"parts/{first_byte:015d}-{secrets.token_hex(8)}"
