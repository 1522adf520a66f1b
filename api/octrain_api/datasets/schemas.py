"""Data sets as they are announced and shown."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octrain_api.pagination import Page

DatasetStatus = Literal["uploading", "checking", "ready", "invalid"]
Media = Literal["jsonl", "text", "parquet"]
DataFormat = Literal["text", "prompt_completion", "chat", "labelled"]
# The columns that each format reads; a spec that uses the data set must name them alike.
ROLES: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "chat": ("messages",),
    "labelled": ("text", "label"),
}
SUFFIXES = {"jsonl": ".jsonl", "text": ".txt", "parquet": ".parquet"}

Column = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]
EXAMPLE: dict[str, Any] = {
    "name": "support-chats-2026",
    "size": 104857600,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "media": "jsonl",
    "format": "chat",
}


class Columns(BaseModel):
    """Names of the fields of a record, by role; only those that the format reads matter."""

    model_config = ConfigDict(extra="forbid")

    text: Column = "text"
    prompt: Column = "prompt"
    completion: Column = "completion"
    messages: Column = "messages"
    label: Column = "label"


class DatasetRequest(BaseModel):
    """A file that is to be uploaded."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [EXAMPLE]})

    name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")
    size: int = Field(strict=True, ge=1, le=2**50, description="bytes of the whole file")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="of the whole file")
    media: Media = Field(description="JSON Lines, plain UTF-8 text, or Parquet")
    format: DataFormat = Field(
        default="text", description="what a record is, as `data.format` of a spec says it"
    )
    columns: Columns = Field(default_factory=Columns)

    @model_validator(mode="after")
    def _text_is_text(self) -> Self:
        if self.media == "text" and self.format != "text":
            raise ValueError("plain text has no fields: its format can only be text")
        return self


class DataProblem(BaseModel):
    """Something wrong in the file."""

    line: int | None = Field(description="from 1; of Parquet the row; null for the whole file")
    message: str


class DatasetObject(BaseModel):
    """A data set and how far it is."""

    id: str = Field(description="what `data.dataset` of a spec names")
    owner: str
    name: str
    media: Media
    format: DataFormat
    columns: dict[str, str]
    size: int
    sha256: str
    status: DatasetStatus
    received: int = Field(description="bytes stored so far: where the next part begins")
    rows: int | None = Field(description="records (lines, of text) found by the check")
    problem_count: int
    problems: list[DataProblem] = Field(description="the first 100")
    created_at: datetime
    updated_at: datetime
    checked_at: datetime | None
    expires_at: datetime | None = Field(
        description="an unfinished upload is removed then, unless a part comes before"
    )


class DatasetList(Page):
    """One page of data sets, newest first."""

    items: list[DatasetObject]
    bytes_used: int = Field(description="of the quota, by uploads under way and ready data sets")
    bytes_allowed: int
