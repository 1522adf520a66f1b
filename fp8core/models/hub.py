"""Models of the Hugging Face hub, or of this machine's hub cache: the files of one revision."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fp8core.errors import ModelUnavailable

__all__ = ["fetch"]

_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_WEIGHTS = ["model*.safetensors"]
# Copies of the same weights in other formats lie in folders of their own.
_IGNORED = ["*/*", "adapter_model*"]


def fetch(repo_id: str, revision: str | None, *, weights: bool = True) -> Path:
    """The local folder with configuration, tokenizer and (with ``weights``) safetensors.

    Pickled weights are never fetched. Offline (``HF_HUB_OFFLINE``) only the cache is asked.
    Raises ``ModelUnavailable``, which says what to do.
    """
    where = f"model {repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=_SMALL_FILES + (_WEIGHTS if weights else []),
            ignore_patterns=_IGNORED,
        )
    except GatedRepoError as error:
        raise _unavailable(where, "its owner must grant access first", error) from error
    except RevisionNotFoundError as error:
        raise _unavailable(where, "the hub has no such revision", error) from error
    except RepositoryNotFoundError as error:
        raise _unavailable(where, "the hub has no such model, or it is private", error) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = "it is not in this machine's hub cache, and the hub cannot be reached"
        raise _unavailable(where, reason, error) from error
    except HFValidationError as error:
        raise _unavailable(where, str(error), error) from error
    except (HfHubHTTPError, OSError) as error:
        raise _unavailable(where, f"the hub failed: {error}", error) from error
    return Path(folder)


def _unavailable(where: str, reason: str, error: Exception) -> ModelUnavailable:
    return ModelUnavailable(f"{where}: {reason}", pointer="/model/id")
