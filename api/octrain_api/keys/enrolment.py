"""One-time tokens with which machines get the keys of their nodes."""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import database_now
from octrain_api.ids import new_id
from octrain_api.keys.principal import hash_key, new_token
from octrain_api.keys.repository import TokenRepository
from octrain_api.keys.schemas import (
    EnrolRequest,
    KeyRequest,
    NewKeyObject,
    NewTokenObject,
    TokenObject,
    TokenRequest,
)
from octrain_api.keys.service import KeyService
from octrain_api.models import EnrolmentToken
from octrain_api.nodes.repository import NodeRepository
from octrain_api.problems import Problem, not_found


class EnrolmentService:
    """Tokens are shown once, serve once, and end by themselves."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._tokens = TokenRepository(session)

    async def create(self, request: TokenRequest, owner: str) -> NewTokenObject:
        """Make a token."""
        token = new_token()
        now = await database_now(self._session)
        row = EnrolmentToken(
            id=new_id("tok"),
            token_hash=hash_key(token),
            owner=request.owner or owner,
            node_name=request.node,
            expires_at=now + timedelta(seconds=request.expires_in_seconds),
        )
        await self._tokens.add(row)
        return NewTokenObject(**_token_object(row).model_dump(), token=token)

    async def list_newest(self, limit: int) -> list[TokenObject]:
        """The newest tokens first, used and ended ones too."""
        return [_token_object(row) for row in await self._tokens.newest(limit)]

    async def revoke(self, token_id: str) -> TokenObject:
        """End a token that has not been used; the key of one that has stays."""
        row = await self._tokens.lock(token_id)
        if row is None:
            raise not_found("token", token_id)
        if row.used_at is None:
            row.expires_at = min(row.expires_at, await database_now(self._session))
            await self._session.flush()
        return _token_object(row)

    async def enrol(self, request: EnrolRequest) -> NewKeyObject:
        """Exchange a token for the key of the node; once."""
        row = await self._tokens.use(hash_key(request.token))
        if row is None:
            raise _refused("This enrolment token is unknown, expired or used.")
        if row.node_name is not None and row.node_name != request.node:
            raise _refused(f"This enrolment token is for the node {row.node_name!r}.")
        known = await NodeRepository(self._session).claim_name(request.node)
        if known is not None and (row.node_name is None or known.owner != row.owner):
            raise Problem(
                403,
                "node-name-taken",
                "Not allowed",
                f"There is a node {request.node!r} already. To give it a new key, enrol it with a "
                "token of its owner that names it.",
            )
        wanted = KeyRequest(
            name=f"node {request.node}"[:128], owner=row.owner, scopes=["node"], node=request.node
        )
        key = await KeyService(self._session).create(wanted)
        row.key_id = key.id
        await self._session.flush()
        return key


def _refused(detail: str) -> Problem:
    return Problem(
        401,
        "not-authenticated",
        "Not authenticated",
        detail,
        headers={"WWW-Authenticate": 'Bearer realm="octrain"'},
    )


def _token_object(row: EnrolmentToken) -> TokenObject:
    return TokenObject(
        id=row.id,
        owner=row.owner,
        node=row.node_name,
        created_at=row.created_at,
        expires_at=row.expires_at,
        used_at=row.used_at,
        key_id=row.key_id,
    )
