"""The audit log as it is shown."""

from datetime import datetime

from pydantic import BaseModel, Field

from octrain_api.pagination import Page


class AuditObject(BaseModel):
    """One change, or the refusal of one."""

    id: int
    time: datetime
    key_id: str
    owner: str = Field(description="of the key")
    address: str | None = Field(description="where the request came from")
    request_id: str
    method: str
    route: str
    target: str | None = Field(description="the id or the name of what was changed")
    status: int
    outcome: str = Field(description="done, refused or failed")


class AuditList(Page):
    """Entries, newest first."""

    items: list[AuditObject]
