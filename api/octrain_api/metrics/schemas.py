"""Metric series as readers see them."""

from pydantic import BaseModel, Field


class Series(BaseModel):
    """One metric of one attempt."""

    name: str
    attempt: int
    points: list[tuple[int, float | str]] = Field(
        description='[step, value]; "NaN", "Infinity" and "-Infinity" are strings'
    )


class SeriesList(BaseModel):
    """Series by name, then attempt."""

    series: list[Series]
