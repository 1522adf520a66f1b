"""Queued jobs onto live nodes: a tick reads sets, plans in memory, and commits one transaction.

A tick costs as much as there are nodes, different needs and placements, not queued jobs: of each
need only the head of its queue is read, because where the first finds no room none behind it does.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.controller import damaged, preemption
from octrain_api.controller.figures import Figures
from octrain_api.controller.placement import UNREADABLE, Need
from octrain_api.controller.plan import (
    DRAINED,
    NOT_HEARD,
    SET_ASIDE,
    Choice,
    Plan,
    Registry,
    Room,
)
from octrain_api.controller.queue import (
    DRAINING,
    OPEN,
    QUARANTINED,
    SILENT,
    NodeState,
    QueueRepository,
    Waiting,
)
from octrain_api.database import Database
from octrain_api.jobs.placing import Placed, place_many
from octrain_api.jobs.views import OF_OWNER, THE_SCHEDULER
from octrain_api.settings import ControllerSettings, QuotaSettings, SchedulerSettings
from octrain_api.usage.service import PlacesLeft, UsageService

log = logging.getLogger("octrain_api.scheduler")

# Nodes whose descriptions are read by one tick: 250 take about 5 ms.
_LEARNT_AT_ONCE = 250
# Placements per transaction, and after how many seconds a tick begins no other: on a busy machine
# it places fewer, and takes no longer.
_TOGETHER = 25
_NO_MORE_AFTER = 0.02
_CLOSED = {SILENT: NOT_HEARD, DRAINING: DRAINED, QUARANTINED: SET_ASIDE}


@dataclass
class _Decisions:
    choices: list[Choice]
    # The first job of each need that found no room.
    blocked: dict[Need, Waiting]
    full: bool = False
    # Owners of whom no more jobs may run, as far as these choices go.
    owners_full: set[str] = field(default_factory=set)


class Scheduler:
    """Keeps from tick to tick what seldom changes: what nodes can do, and for whom one is held.

    Nothing is lost with it: another controller finds out the same from the database.
    """

    def __init__(
        self,
        database: Database,
        controller: ControllerSettings,
        settings: SchedulerSettings,
        quotas: QuotaSettings | None = None,
    ) -> None:
        self._database = database
        self._controller = controller
        self._settings = settings
        self._quotas = quotas if quotas is not None else QuotaSettings()
        self._registry = Registry()
        self._figures = Figures()
        self._held: dict[str, str] = {}
        # Jobs that can neither be placed nor ended, for their rows are damaged.
        self._hopeless: set[str] = set()
        # What was last said of each need, and when by this process's clock.
        self._said: dict[str, str] | None = None
        self._said_at = 0.0

    async def prepare(self) -> None:
        """Do what the first tick would do once and for all, so that it takes no longer than others:
        connect, read what every node can do, in slices, and have the statements ready."""
        behind = True
        while behind:
            async with self._database.snapshot() as session:
                queue = QueueRepository(session)
                states = await queue.node_states(self._controller.heartbeat_ttl)
                behind = await self._learn(queue, states)
                needs, _ = damaged.readable(await queue.needs())
                left = await UsageService(session, self._quotas).places_left()
                await queue.heads(dict.fromkeys(needs, 0), left.full)
        plan = self._plan(states)
        for need in needs.values():
            plan.room_for(plan.effective(need), 1)
        async with self._database.transaction() as session:
            await place_many(session, [])

    async def run(self) -> int:
        """Tick until nothing more can be placed; how many jobs were."""
        total = 0
        while True:
            placed, more = await self.tick()
            total += placed
            if not more:
                return total

    async def tick(self) -> tuple[int, bool]:
        """Place up to `batch` jobs and say of each need what its jobs wait for.

        How many were placed, and whether another tick is due at once: the batch was full, or so
        many nodes have registered anew that this one only read of some.
        """
        began = time.monotonic()
        plan = None
        behind = False
        async with self._database.snapshot() as session:
            queue = QueueRepository(session)
            needs, unreadable = damaged.readable(await queue.needs())
            if needs:
                states = await queue.node_states(self._controller.heartbeat_ttl)
                behind = await self._learn(queue, states)
            if needs and not behind:
                plan = self._plan(states)
                most = self._settings.batch
                # One more than may fit: the one that then tells what the rest waits for.
                sizes = {
                    text: min(plan.room_for(plan.effective(need), most) + 1, most)
                    for text, need in needs.items()
                }
                left = await UsageService(session, self._quotas).places_left()
                heads = await queue.heads(sizes, left.full, self._hopeless)
        if unreadable:
            await damaged.end_unreadable(self._database, unreadable)
        if behind:
            return 0, True
        if plan is None:
            if self._said != {}:
                async with self._database.transaction() as session:
                    await self._say(session, {})
            return 0, False
        decisions = self._decide(plan, needs, heads, left)
        texts = dict.fromkeys(needs, THE_SCHEDULER)
        for text, need in needs.items():
            if plan.effective(need) in decisions.blocked:
                texts[text] = plan.why_not(plan.effective(need))
        for owner in decisions.owners_full:
            texts[OF_OWNER + owner] = f"a running job of {owner} to end: no more may run at once"
        choices, rest = decisions.choices[:_TOGETHER], decisions.choices[_TOGETHER:]
        placed, apart = await self._commit(choices, texts)
        while rest and not apart and time.monotonic() < began + _NO_MORE_AFTER:
            choices, rest = rest[:_TOGETHER], rest[_TOGETHER:]
            more, apart = await self._commit(choices, texts)
            placed += more
        waited = {job.id: job.waited for job in heads}
        self._figures.placed(len(placed), [waited[p.job_id] for p in placed if p.number == 1])
        await self._figures.write(self._database)
        for each in placed:
            log.info("placed %s attempt %d on %s", each.job_id, each.number, each.choice.node.name)
        full = decisions.full or bool(rest)
        if self._settings.preemption == "pause" and decisions.blocked and not full:
            self._held |= await preemption.make_room(self._database, plan, decisions.blocked)
        return len(placed), apart or (full and bool(placed))

    async def _commit(
        self, choices: list[Choice], texts: dict[str, str]
    ) -> tuple[list[Placed], bool]:
        """Place in one transaction, and say in it what the rest waits for, if that is news.

        Where the whole fails for one job, each is placed by itself: those placed, and whether that
        was so, and there may be room now for others.
        """
        if not choices and not self._is_news(texts):
            return [], False
        try:
            async with self._database.transaction() as session:
                placed = await place_many(session, choices) if choices else []
                if self._is_news(texts):
                    await self._say(session, texts)
            return placed, False
        except damaged.DAMAGE:
            if not choices:
                raise
            log.exception("%d jobs cannot be placed together, trying one by one", len(choices))
        placed, hopeless = await damaged.place_each(self._database, choices)
        self._hopeless |= hopeless
        # Said anew by the next tick, for the one before may have been rolled back.
        self._said = None
        return placed, True

    def _is_news(self, texts: dict[str, str]) -> bool:
        late = time.monotonic() - self._said_at >= self._settings.refresh
        return texts != self._said or late

    async def _say(self, session: AsyncSession, texts: dict[str, str]) -> None:
        await QueueRepository(session).write_groups(texts)
        self._said, self._said_at = texts, time.monotonic()

    async def _learn(self, queue: QueueRepository, states: Sequence[NodeState]) -> bool:
        """Read of nodes that describe themselves anew; whether some are left for the next time.

        Nothing is placed until all are known: a plan without them might pause jobs for want of a
        node that there is.
        """
        known = self._registry.nodes
        changed = [
            state.id
            for state in states
            if state.id not in known or known[state.id].described != state.described
        ]
        if changed:
            self._registry.update(await queue.describe(changed[:_LEARNT_AT_ONCE]))
        return len(changed) > _LEARNT_AT_ONCE

    def _plan(self, states: Sequence[NodeState]) -> Plan:
        known = self._registry.nodes
        rooms: list[Room] = []
        closed: dict[str, str] = {}
        for node_id, _, state, cpu, gpus in states:
            if state != OPEN:
                closed[node_id] = _CLOSED[state]
                continue
            node = known[node_id]
            if not node.readable:
                closed[node_id] = UNREADABLE
                continue
            rooms.append(Room(node, node.cpu_slots - cpu, len(node.gpus) - gpus))
        return Plan(rooms, closed, self._registry)

    def _decide(
        self,
        plan: Plan,
        needs: dict[str, Need],
        heads: list[Waiting],
        left: PlacesLeft,
    ) -> _Decisions:
        decisions = _Decisions([], {}, owners_full=left.full)
        held: dict[str, str] = {}
        for job in heads:
            need = plan.effective(needs[job.need])
            if need in decisions.blocked or job.owner in decisions.owners_full:
                continue
            choice = plan.place(job.id, need, job.avoid_nodes)
            if choice is None:
                decisions.blocked[need] = job
                node_id = self._hold(plan, need, job)
                if node_id is not None:
                    held[job.id] = node_id
                continue
            # The job is stored under its own need, whatever its pin has come to.
            decisions.choices.append(replace(choice, need=job.need))
            if left.take(job.owner):
                decisions.owners_full.add(job.owner)
            if len(decisions.choices) == self._settings.batch:
                decisions.full = True
                break
        # What was not reached this time is kept as it was.
        self._held = self._held | held if decisions.full else held
        return decisions

    def _hold(self, plan: Plan, need: Need, job: Waiting) -> str | None:
        """Keep a node free for a job that waits for several GPUs, so that small ones cannot
        for ever take them one by one; at once when others were paused for it."""
        before = self._held.get(job.id)
        if need.ranks < 2 or plan.device(need) != "cuda":
            return None
        if before is None and job.waited < self._settings.reserve_after:
            return None
        return plan.hold(job.id, need, before)
