"""The holder of a key, and what a key may do."""

import hashlib
import secrets
from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a key may do. `admin` may do what `jobs:read` and `jobs:write` may, for every owner."""

    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    ADMIN = "admin"
    NODE = "node"


@dataclass(frozen=True)
class Principal:
    """The holder of the key of this request."""

    key_id: str
    owner: str
    scopes: frozenset[str]
    # The one node that a key of the scope `node` speaks for; None before its first registration.
    node: str | None = None

    @property
    def is_admin(self) -> bool:
        """Whether this key sees every owner's jobs."""
        return Scope.ADMIN in self.scopes

    @property
    def visible_owner(self) -> str | None:
        """The owner whose jobs this key sees; None for all."""
        return None if self.is_admin else self.owner

    def sees(self, owner: str) -> bool:
        """Whether this key sees this owner's jobs."""
        return self.is_admin or self.owner == owner

    def may(self, scope: Scope) -> bool:
        """Whether the key grants `scope`."""
        if scope in self.scopes:
            return True
        return self.is_admin and scope in (Scope.JOBS_READ, Scope.JOBS_WRITE)


def new_key() -> str:
    """A key of 256 random bits."""
    return f"oct_{secrets.token_urlsafe(32)}"


def new_token() -> str:
    """An enrolment token of 256 random bits."""
    return f"octn_{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """SHA-256 in hexadecimal: enough for a value of 256 random bits, which nobody can guess."""
    return hashlib.sha256(key.encode()).hexdigest()
