"""Sessions as they are asked for and shown."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field


class SessionRequest(BaseModel):
    """Sign in with an API key."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"key": "oct_..."}]},
    )

    key: str = Field(min_length=1, max_length=200, description="an API key")


class SessionObject(BaseModel):
    """Who is signed in, and what proves that a request comes from a page of this service."""

    id: str
    key_id: str = Field(description="the key that opened the session; it ends with it")
    key_name: str
    owner: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime
    csrf_token: str = Field(
        description="Every request of this session but GET and HEAD sends it in `X-Octrain-CSRF`."
    )
