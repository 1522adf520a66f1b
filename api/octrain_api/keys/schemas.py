"""API keys as they are asked for and shown."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field

ScopeName = Literal["jobs:read", "jobs:write", "admin", "node"]
Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00]+$")]


class KeyRequest(BaseModel):
    """A new key."""

    name: Label
    owner: Label
    scopes: list[ScopeName] = Field(min_length=1, max_length=4)


class KeyObject(BaseModel):
    """A key without its secret."""

    id: str
    name: str
    owner: str
    scopes: list[str]
    created_at: datetime
    revoked_at: datetime | None


class NewKeyObject(KeyObject):
    """The only answer that holds the key itself."""

    key: str


class KeyList(BaseModel):
    """Every key, oldest first."""

    items: list[KeyObject]
