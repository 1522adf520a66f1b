"""The dashboard's built files, and in which form each is sent."""

import mimetypes
import os
from dataclasses import dataclass
from pathlib import Path

# Built beside each file, the smallest first. Source: `dashboard/scripts/compress.mjs`.
_CODINGS = (("br", ".br"), ("gzip", ".gz"))
_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml", ".woff2": "font/woff2"}
# Vite puts here what has a hash of its content in its name, and nothing else.
HASHED = "assets/"
INDEX = "index.html"


def dashboard_folder() -> Path:
    """Where a build lies: inside the installed package, else in the checkout."""
    inside = Path(__file__).resolve().parent / "dist"
    if (inside / INDEX).is_file():
        return inside
    return Path(__file__).resolve().parents[3] / "dashboard" / "dist"


@dataclass(frozen=True)
class BuiltFile:
    """A file as it is sent: perhaps compressed ahead."""

    path: Path
    media_type: str
    coding: str | None
    etag: str
    hashed: bool


def find_file(folder: Path, name: str, accepted: str) -> BuiltFile | None:
    """The built file of this name in the smallest form that `Accept-Encoding` allows."""
    if any(part.startswith(".") for part in name.split("/")):
        return None
    path = folder / name
    if not _is_inside(folder, path):
        return None
    chosen, coding = path, None
    for offered, suffix in _CODINGS:
        compressed = path.with_name(path.name + suffix)
        if _accepts(accepted, offered) and _is_inside(folder, compressed):
            chosen, coding = compressed, offered
            break
    status = chosen.stat()
    media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
    return BuiltFile(
        path=chosen,
        media_type=media_type or "application/octet-stream",
        coding=coding,
        etag=f'"{status.st_mtime_ns:x}-{status.st_size:x}"',
        hashed=name.startswith(HASHED),
    )


def _is_inside(folder: Path, path: Path) -> bool:
    """Whether this is a file below the folder, wherever links lead."""
    try:
        found = path.resolve(strict=True)
    except (OSError, ValueError):
        return False
    return found.is_relative_to(folder.resolve()) and os.path.isfile(found)


def _accepts(header: str, coding: str) -> bool:
    """Whether `Accept-Encoding` names this coding with a weight above 0 (RFC 9110 12.5.3)."""
    for part in header.lower().split(","):
        name, _, weight = part.strip().partition(";")
        if name.strip() == coding:
            return weight.replace(" ", "").removeprefix("q=").strip("0.") != "" or not weight
    return False
