"""An FP8 cast written from the format's definition, for tests to compare with, in float64.

It knows nothing of torch. A format is the list of its non-negative values, made code by code from
the formula; a cast is a search in that list.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine"):
    # Before any test computes: where the system has another cuDNN than PyTorch's, Transformer
    # Engine loads parts of the one after PyTorch has loaded parts of the other, and fails
    # ("undefined symbol" in libcudnn_cnn); later tests would skip or fail for that alone.
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        import transformer_engine.pytorch  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@dataclass(frozen=True)
class ReferenceFormat:
    """One FP8 format: the values of the codes 0 to 127 (NaN and infinities as such)."""

    name: str
    dtype: torch.dtype
    values: tuple[float, ...]

    @property
    def finite(self) -> np.ndarray:
        return np.array([value for value in self.values if math.isfinite(value)])

    @property
    def max(self) -> float:
        return float(self.finite[-1])

    def cast(self, numbers: np.ndarray) -> np.ndarray:
        """Nearest value, ties to the even code, saturating; NaN and the sign of zero stay."""
        numbers = np.asarray(numbers, dtype=np.float64)
        size = np.minimum(np.abs(np.nan_to_num(numbers, nan=0.0, posinf=np.inf)), self.max)
        upper = np.searchsorted(self.finite, size)  # first value not below
        lower = np.maximum(upper - 1, 0)
        above, below = self.finite[upper] - size, size - self.finite[lower]
        even_is_upper = upper % 2 == 0
        take_upper = (above < below) | ((above == below) & even_is_upper)
        nearest = np.where(take_upper, self.finite[upper], self.finite[lower])
        return np.where(np.isnan(numbers), np.nan, np.copysign(nearest, numbers))


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    if code == 0x7F:
        return math.nan
    if exponent == 0:
        return mantissa * 2.0**-9
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _e5m2(code: int) -> float:
    exponent, mantissa = code >> 2, code & 3
    if exponent == 31:
        return math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return mantissa * 2.0**-16
    return (1 + mantissa / 4) * 2.0 ** (exponent - 15)


REFERENCE_FORMATS = {
    "E4M3": ReferenceFormat("E4M3", torch.float8_e4m3fn, tuple(map(_e4m3, range(128)))),
    "E5M2": ReferenceFormat("E5M2", torch.float8_e5m2, tuple(map(_e5m2, range(128)))),
}


@pytest.fixture(scope="session")
def reference_formats() -> dict[str, ReferenceFormat]:
    """Both formats by name."""
    return REFERENCE_FORMATS


@pytest.fixture(params=["E4M3", "E5M2"])
def reference_format(request: pytest.FixtureRequest) -> ReferenceFormat:
    """Each format in turn."""
    return REFERENCE_FORMATS[request.param]


class SmallDisk:
    """A disk of 4 MiB that something else fills up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    @contextlib.contextmanager
    def filled_once_there_is(self, pattern: str) -> Iterator[None]:
        """While inside, the disk is filled up to 64 KiB as soon as a path matches."""
        over = threading.Event()

        def fill() -> None:
            while not any(self.folder.glob(pattern)):
                if over.wait(0.001):
                    return
            with self._filler.open("wb", buffering=0) as file:
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * 4096)
                file.truncate(file.tell() - (64 << 10))

        thread = threading.Thread(target=fill)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def free(self) -> None:
        """Take the filler away."""
        self._filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A tmpfs that can be filled up."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield SmallDisk(folder)
    subprocess.run(["umount", str(folder)], check=True)
