"""Plans in the database: asked for once, taken by one node at a time, kept for a while."""

from typing import Any

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import seconds
from octrain_api.models import PlanRequest

# A node that took a question and has not answered for so long is presumed gone.
TAKEN_SECONDS = 180
# The same question is worked out anew after so long: files may have changed.
READY_SECONDS = 3600
FAILED_SECONDS = 30
# A question that no node took, and answers, are kept for so long.
_KEPT_SECONDS = 86_400


class PlanRepository:
    """Questions and answers."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def ask(self, key: str, owner: str, spec: dict[str, Any]) -> PlanRequest:
        """The plan of this key; asked for now unless that was done lately."""
        outdated = or_(
            (PlanRequest.status == "ready")
            & (PlanRequest.answered_at <= func.now() - seconds(READY_SECONDS)),
            (PlanRequest.status == "failed")
            & (PlanRequest.answered_at <= func.now() - seconds(FAILED_SECONDS)),
        )
        fresh = {
            "status": "waiting",
            "asked_at": func.now(),
            "taken_at": None,
            "answered_at": None,
            "result": None,
            "problem": None,
            "node_id": None,
        }
        await self._session.execute(
            insert(PlanRequest)
            .values(key=key, owner=owner, spec=spec)
            .on_conflict_do_update(index_elements=["key"], set_=fresh, where=outdated)
        )
        found = await self.get(key)
        assert found is not None
        return found

    async def get(self, key: str) -> PlanRequest | None:
        """The plan of this key, as it is now."""
        statement = select(PlanRequest).where(PlanRequest.key == key)
        statement = statement.execution_options(populate_existing=True)
        return (await self._session.scalars(statement)).one_or_none()

    async def take(self, node_id: str) -> PlanRequest | None:
        """The oldest question that no node works on, which this node now does."""
        lost = PlanRequest.taken_at <= func.now() - seconds(TAKEN_SECONDS)
        oldest = (
            select(PlanRequest.key)
            .where(PlanRequest.answered_at.is_(None))
            .where(or_(PlanRequest.taken_at.is_(None), lost))
            .order_by(PlanRequest.asked_at)
            .limit(1)
            .with_for_update(skip_locked=True)
            .scalar_subquery()
        )
        statement = (
            update(PlanRequest)
            .where(PlanRequest.key == oldest)
            .values(status="taken", taken_at=func.now(), node_id=node_id)
            .returning(PlanRequest)
            .execution_options(populate_existing=True)
        )
        return (await self._session.scalars(statement)).one_or_none()

    async def answer(
        self, key: str, node_id: str, result: dict[str, Any] | None, problem: str | None
    ) -> bool:
        """Store what the node found; False when another node has it by now."""
        statement = (
            update(PlanRequest)
            .where(PlanRequest.key == key, PlanRequest.node_id == node_id)
            .where(PlanRequest.status == "taken")
            .values(
                status="failed" if result is None else "ready",
                result=result,
                problem=problem,
                answered_at=func.now(),
            )
            .returning(PlanRequest.key)
        )
        return (await self._session.scalar(statement)) is not None

    async def forget_old(self) -> int:
        """Remove what nobody will ask for again; how many."""
        last = func.coalesce(PlanRequest.answered_at, PlanRequest.asked_at)
        statement = (
            delete(PlanRequest)
            .where(last <= func.now() - seconds(_KEPT_SECONDS))
            .returning(PlanRequest.key)
        )
        return len((await self._session.scalars(statement)).all())
