"""One metric of one attempt, as the server answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from octrain.client.libraries import library
from octrain.client.models import Answer, Number

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Series"]


class Series(Answer):
    """One metric of one attempt, as ``(step, value)`` pairs in the order of the steps.

    ``buckets`` has columns instead (``first_step``, ``min``, ``max``, ``mean``, ``last``, ...), of
    ``width`` steps each, where they were asked for.
    """

    job_id: str | None = None
    name: str
    attempt: int | None = None
    points: list[tuple[Number, Number]] = Field(default_factory=list)
    width: int | None = None
    buckets: dict[str, list[Any]] | None = None

    @field_validator("points", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return [] if value is None else value

    @property
    def steps(self) -> list[int]:
        return [int(step) for step, _ in self.points]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    def to_numpy(self) -> np.ndarray:
        """float64 array of shape [points, 2]: step, value. Needs numpy."""
        numpy = library("numpy")
        array: np.ndarray = numpy.asarray(self.points, dtype=numpy.float64).reshape(-1, 2)
        return array
