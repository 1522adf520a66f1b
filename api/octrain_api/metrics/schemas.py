"""Metric series as readers see them."""

from pydantic import BaseModel, Field

Number = float | str


class Buckets(BaseModel):
    """Columns of equal length: one element a bucket, in the order of steps.

    A bucket holds the points of `width` steps. `min`, `max` and `mean` are of the finite values,
    null where there are none; "NaN", "Infinity" and "-Infinity" are strings.
    """

    first_step: list[int]
    min: list[Number | None]
    max: list[Number | None]
    mean: list[Number | None]
    last: list[Number]
    last_step: list[int]
    min_step: list[int | None]
    max_step: list[int | None]
    count: list[int]
    non_finite: list[int] = Field(description="how many of the points are NaN or infinite")
    time: list[float | None] = Field(
        description="when the last of them was recorded, seconds since the epoch"
    )
    tokens: list[int | None] = Field(description="tokens trained on by then")


class Series(BaseModel):
    """One metric of one attempt."""

    job_id: str
    name: str
    attempt: int
    points: list[tuple[Number | None, Number]] | None = Field(
        default=None,
        description='[x, value]; "NaN", "Infinity" and "-Infinity" are strings. '
        "With form=points only.",
    )
    width: int | None = Field(
        default=None, description="steps of a bucket, a power of two. With form=buckets only."
    )
    buckets: Buckets | None = None


class SeriesList(BaseModel):
    """Series by name, then attempt."""

    series: list[Series]
    cursor: int = Field(description="pass it as `since` to get only what is recorded later")


class JobsSeries(BaseModel):
    """Series of several jobs: by job, name and attempt."""

    series: list[Series]
    cursors: dict[str, int] = Field(
        description="for each job the number after which later points are"
    )


class Latest(BaseModel):
    """The newest value of one metric."""

    name: str
    attempt: int
    step: int
    value: Number
    first_step: int
    points: int = Field(description="how many this attempt has")


class LatestPage(BaseModel):
    """Metrics by name."""

    items: list[Latest]
    next_cursor: str | None = Field(description="pass it as `cursor` for the next page")
