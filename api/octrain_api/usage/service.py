"""Quotas per owner: how many jobs may wait, how many may run, how many GPU-hours may be used.

The queue and the GPU-hours are judged when a job is submitted, the running ones when it is placed:
a job over that quota waits, and says so.
"""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.database import lock_name
from octrain_api.models import OwnerQuota
from octrain_api.problems import Problem, not_found
from octrain_api.settings import QuotaSettings
from octrain_api.usage.repository import UsageRepository
from octrain_api.usage.schemas import OwnerQuotas, OwnerQuotasList, Quotas, UsageObject


@dataclass
class PlacesLeft:
    """How many more jobs may be placed: of the owners named, and of each other one. None: any."""

    by_owner: dict[str, int | None]
    default: int | None

    @property
    def full(self) -> set[str]:
        """The owners of whom no more jobs may run."""
        return {owner for owner, left in self.by_owner.items() if left == 0}

    def take(self, owner: str) -> bool:
        """Count a placement; whether it was the owner's last one."""
        left = self.by_owner.get(owner, self.default)
        if left is None:
            return False
        self.by_owner[owner] = left - 1
        return left <= 1


class UsageService:
    """What owners use and may use."""

    def __init__(self, session: AsyncSession, settings: QuotaSettings) -> None:
        self._session = session
        self._settings = settings
        self._usage = UsageRepository(session)

    async def check_submission(self, owner: str) -> None:
        """Refuse one more job of an owner whose queue is full or whose GPU-hours are used (403)."""
        quotas = await self._quotas_of(owner)
        if quotas.queued is None and quotas.gpu_hours is None:
            return
        # Submissions of one owner are judged one after the other: each sees those before it.
        await lock_name(self._session, f"quota {owner}")
        if quotas.queued is not None:
            queued, _ = await self._usage.jobs(owner)
            if queued >= quotas.queued:
                raise _exceeded("queued", quotas.queued, queued, "jobs wait in the queue")
        if quotas.gpu_hours is not None:
            used = await self._usage.used(owner, self._settings.window_days)
            hours = round(used.gpu_seconds / 3600, 3)
            if hours >= quotas.gpu_hours:
                what = f"GPU-hours were used within {self._settings.window_days} days"
                raise _exceeded("gpu_hours", quotas.gpu_hours, hours, what)

    @property
    def have_default(self) -> bool:
        """Whether owners without quotas of their own are bounded in what they submit."""
        return self._settings.queued is not None or self._settings.gpu_hours is not None

    async def usage(self, owner: str) -> UsageObject:
        """What an owner uses and may use."""
        queued, running = await self._usage.jobs(owner)
        used = await self._usage.used(owner, self._settings.window_days)
        return UsageObject(
            owner=owner,
            queued=queued,
            running=running,
            gpu_hours=round(used.gpu_seconds / 3600, 6),
            cpu_hours=round(used.cpu_seconds / 3600, 6),
            attempts=used.attempts,
            window_days=self._settings.window_days,
            quotas=await self._quotas_of(owner),
        )

    async def places_left(self) -> PlacesLeft:
        """How many more jobs of each owner may be placed."""
        own = {row.owner: row.running for row in await self._usage.all_quotas()}
        default = self._settings.running
        if default is None and all(limit is None for limit in own.values()):
            return PlacesLeft({}, None)
        placed = await self._usage.placed_by_owner()
        left = {}
        for owner in {*placed, *own}:
            limit = own.get(owner, default)
            left[owner] = max(limit - placed.get(owner, 0), 0) if limit is not None else None
        return PlacesLeft(left, default)

    async def list_quotas(self) -> OwnerQuotasList:
        """Every owner with quotas of their own, and the default of all others."""
        items = [
            OwnerQuotas(owner=row.owner, **_of(row).model_dump())
            for row in await self._usage.all_quotas()
        ]
        return OwnerQuotasList(default=self._default, items=items)

    async def set_quotas(self, owner: str, quotas: Quotas) -> OwnerQuotas:
        """Give an owner quotas of their own, which take the place of the default as a whole."""
        await self._usage.set_quotas(owner, quotas.queued, quotas.running, quotas.gpu_hours)
        return OwnerQuotas(owner=owner, **quotas.model_dump())

    async def remove_quotas(self, owner: str) -> Quotas:
        """Give the owner the default again."""
        if not await self._usage.remove_quotas(owner):
            raise not_found("quota of the owner", owner)
        return self._default

    @property
    def _default(self) -> Quotas:
        settings = self._settings
        return Quotas(
            queued=settings.queued, running=settings.running, gpu_hours=settings.gpu_hours
        )

    async def _quotas_of(self, owner: str) -> Quotas:
        row = await self._usage.quotas(owner)
        return _of(row) if row is not None else self._default


def _of(row: OwnerQuota) -> Quotas:
    return Quotas(queued=row.queued, running=row.running, gpu_hours=row.gpu_hours)


def _exceeded(quota: str, limit: float, used: float, what: str) -> Problem:
    return Problem(
        403,
        "quota-exceeded",
        "Quota exceeded",
        f"{used:g} {what}; the quota is {limit:g}.",
        quota=quota,
        limit=limit,
        used=used,
    )
