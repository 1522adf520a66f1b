"""API keys as they are asked for and shown."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from octrain_api.pagination import Page

ScopeName = Literal["jobs:read", "jobs:write", "admin", "node"]
Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00]+$")]
NodeName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")]
LONGEST_GRACE = 30 * 86_400


class KeyRequest(BaseModel):
    """A new key."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"name": "laptop", "owner": "ada", "scopes": ["jobs:read", "jobs:write"]},
                {"name": "gpu-1", "owner": "operations", "scopes": ["node"], "node": "gpu-1"},
            ]
        },
    )

    name: Label
    owner: Label
    scopes: list[ScopeName] = Field(
        min_length=1, max_length=4, description="`node` stands alone: such a key is a machine's"
    )
    expires_at: AwareDatetime | None = Field(default=None, description="null: never")
    node: NodeName | None = Field(
        default=None,
        description="with the scope `node`: the one node that the key speaks for, whose former "
        "key is revoked. Without, it is the first node that registers with the key.",
    )

    @model_validator(mode="after")
    def _node_keys_stand_alone(self) -> Self:
        if "node" in self.scopes and set(self.scopes) != {"node"}:
            raise ValueError("the scope 'node' cannot be joined with others: make a key for each")
        if self.node is not None and "node" not in self.scopes:
            raise ValueError("only a key of the scope 'node' can name a node")
        return self


class KeyChange(BaseModel):
    """What of a key can be changed; what is not named stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"expires_at": "2030-01-01T00:00:00Z"}]}
    )

    name: Label | None = None
    expires_at: AwareDatetime | None = Field(default=None, description="null: never")


class KeyRotation(BaseModel):
    """How long the present key serves beside the new one."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"grace_seconds": 86_400}]}
    )

    grace_seconds: int = Field(default=86_400, strict=True, ge=0, le=LONGEST_GRACE)


class KeyObject(BaseModel):
    """A key without its secret."""

    id: str
    name: str
    owner: str
    scopes: list[str]
    node: str | None = Field(description="the one node that a key of the scope `node` speaks for")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None = Field(description="to the minute; null: never used")
    previous_until: datetime | None = Field(
        description="until then the key before the last rotation serves as well"
    )


class NewKeyObject(KeyObject):
    """The only answer that holds the key itself."""

    key: str


class KeyList(Page):
    """Keys, oldest first."""

    items: list[KeyObject]


class TokenRequest(BaseModel):
    """A new enrolment token."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"node": "gpu-1", "expires_in_seconds": 3600}]},
    )

    node: NodeName | None = Field(
        default=None,
        description="the only node that may enrol with it, whose former key is then revoked; "
        "null: any name that no node has",
    )
    owner: Label | None = Field(default=None, description="of the node's key; null: your own")
    expires_in_seconds: int = Field(default=3600, strict=True, ge=10, le=7 * 86_400)


class TokenObject(BaseModel):
    """An enrolment token without its secret."""

    id: str
    owner: str
    node: str | None
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None
    key_id: str | None = Field(description="the key that it was exchanged for")


class NewTokenObject(TokenObject):
    """The only answer that holds the token itself."""

    token: str


class TokenList(BaseModel):
    """The newest tokens first, at most 500."""

    items: list[TokenObject]


class EnrolRequest(BaseModel):
    """A machine asks for the key of its node."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(min_length=1, max_length=200)
    node: NodeName


class EnrolAnswer(BaseModel):
    """The node's key, shown once."""

    key_id: str
    node: str
    key: str
