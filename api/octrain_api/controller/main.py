"""The controller process: one is active at a time, by an advisory lock of the database."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.controller.metrics import MetricKeeper
from octrain_api.controller.reconciler import Reconciler
from octrain_api.controller.relay import BrokerUnavailable, CelerySender, place_elsewhere, relay
from octrain_api.controller.scheduler import Scheduler
from octrain_api.controller.uploads import Uploads
from octrain_api.controller.webhooks import deliver_for_ever
from octrain_api.database import Database
from octrain_api.idempotency.repository import IdempotencyRepository
from octrain_api.listener import QUEUE_CHANNEL, wait_for
from octrain_api.logs.retention import sweep as sweep_logs
from octrain_api.migrate import check_schema
from octrain_api.observability.tracer import make_tracing
from octrain_api.observability.tracing import Tracing
from octrain_api.plans.repository import PlanRepository
from octrain_api.settings import Settings
from octrain_api.tasks import end_tasks

log = logging.getLogger("octrain_api.controller")

CONTROLLER_LOCK = 0x0C7A12

_LONGEST_BROKER_PAUSE = 5.0
_PLANS_SWEEP = 3600.0
# Idempotency keys forgotten at each tick: more than can be used in that time.
_KEYS_AT_ONCE = 5000


async def run(settings: Settings, stop: asyncio.Event | None = None) -> None:
    """Run until `stop` is set, or until SIGTERM or SIGINT. Raises SchemaMismatch."""
    stop = stop or _stop_on_signals()
    database = Database(settings.database, "octrain-controller")
    sender = CelerySender(settings.broker)
    tracing = make_tracing(settings.tracing, "octrain-controller")
    try:
        async with database.session() as session:
            await check_schema(session)
        while not stop.is_set():
            try:
                await _lead(database, settings, sender, tracing, stop)
            except (psycopg.Error, SQLAlchemyError, OSError) as error:
                log.warning("the database is away, trying again: %s", error)
            await wait_for_stop(stop, settings.controller.tick)
    finally:
        sender.close()
        await asyncio.to_thread(tracing.close)
        await database.close()
    log.info("the controller has ended")


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def wait_for_stop(stop: asyncio.Event, seconds: float) -> None:
    """Wait for so long, or until `stop` is set, which stays set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _lead(
    database: Database,
    settings: Settings,
    sender: CelerySender,
    tracing: Tracing,
    stop: asyncio.Event,
) -> None:
    """Hold the lock and run the loops until `stop`, or until the lock's connection is lost."""
    connection = await database.connect()
    async with connection:
        cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", [CONTROLLER_LOCK])
        row = await cursor.fetchone()
        if row is None or not row[0]:
            # Another controller leads; this one stands by.
            return
        log.info("this controller leads")
        await connection.execute(f"LISTEN {QUEUE_CHANNEL}")
        loops = _Loops(database, settings, sender, tracing)
        await loops.prepare()
        tasks = loops.start()
        try:
            await _watch(connection, loops, tasks, stop, settings.controller.tick)
        finally:
            # A loop ends between two transactions, or rolls back the one it is in.
            await end_tasks(tasks)


async def _watch(
    connection: psycopg.AsyncConnection[tuple[object, ...]],
    loops: "_Loops",
    tasks: list[asyncio.Task[None]],
    stop: asyncio.Event,
    tick: float,
) -> None:
    """Hand on wake-ups; raises when the connection, and with it the lock, is lost."""
    stopping = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set():
            listening = asyncio.create_task(_next_wakeup(connection, max(tick, 0.2)))
            await asyncio.wait([listening, stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
                    raise RuntimeError("a loop of the controller has ended")
            if not listening.done():
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            elif listening.result():
                loops.wake_scheduler.set()
    finally:
        stopping.cancel()


async def _next_wakeup(
    connection: psycopg.AsyncConnection[tuple[object, ...]], seconds: float
) -> bool:
    """Whether a notification came within so many seconds; checks the connection as well."""
    async for _ in connection.notifies(timeout=seconds, stop_after=1):
        return True
    await connection.execute("SELECT 1")
    return False


class _Loops:
    """The loops of the leading controller."""

    def __init__(
        self, database: Database, settings: Settings, sender: CelerySender, tracing: Tracing
    ) -> None:
        self._database = database
        self._tracing = tracing
        self._all_settings = settings
        self._settings = settings.controller
        self._reconciler = Reconciler(database, settings)
        self._scheduler = Scheduler(
            database, settings.controller, settings.scheduler, settings.quotas
        )
        self._metrics = MetricKeeper(database, settings.metrics)
        self._uploads = Uploads(database, settings)
        self._sender = sender
        self._broker_pause = 0.0
        self._plans_swept = float("-inf")
        self.wake_scheduler = asyncio.Event()
        self._wake_relay = asyncio.Event()
        self._wake_metrics = asyncio.Event()

    async def prepare(self) -> None:
        """What is better done before the loops run."""
        await self._scheduler.prepare()

    def start(self) -> list[asyncio.Task[None]]:
        """Start every loop."""
        return [
            asyncio.create_task(self._every("scheduler", self._schedule, self.wake_scheduler)),
            asyncio.create_task(self._every("relay", self._relay, self._wake_relay)),
            asyncio.create_task(self._every("reconciler", self._reconcile, asyncio.Event())),
            asyncio.create_task(self._every("metrics", self._keep_metrics, self._wake_metrics)),
            asyncio.create_task(self._every("logs", self._sweep_logs, asyncio.Event())),
            asyncio.create_task(deliver_for_ever(self._all_settings)),
            asyncio.create_task(self._every("uploads", self._uploads.clean, asyncio.Event())),
            asyncio.create_task(self._every("keys", self._forget_keys, asyncio.Event())),
            # Two, so that a large data set holds no small one up.
            *(
                asyncio.create_task(self._every("checks", self._uploads.check, asyncio.Event()))
                for _ in range(2)
            ),
        ]

    async def _every(
        self, name: str, work: Callable[[], Awaitable[None]], wake: asyncio.Event
    ) -> None:
        while True:
            try:
                await work()
            except (SQLAlchemyError, psycopg.Error, OSError) as error:
                log.warning("the %s failed, trying again: %s", name, error)
            except Exception:
                # One bad row must not stop the service of all the others.
                log.exception("the %s failed, trying again", name)
            await wait_for(wake, self._settings.tick)

    async def _schedule(self) -> None:
        placed, more = await self._scheduler.tick()
        if placed:
            self._wake_relay.set()
        if more:
            self.wake_scheduler.set()

    async def _relay(self) -> None:
        try:
            await relay(self._database, self._settings, self._sender, self._tracing)
            self._broker_pause = 0.0
        except BrokerUnavailable as error:
            self._broker_pause = min(self._broker_pause * 2 or 0.5, _LONGEST_BROKER_PAUSE)
            log.warning("the broker is away, trying again in %.1f s: %s", self._broker_pause, error)
            await asyncio.sleep(self._broker_pause)
        await place_elsewhere(self._database, self._settings)

    async def _keep_metrics(self) -> None:
        if await self._metrics.tick():
            self._wake_metrics.set()

    async def _sweep_logs(self) -> None:
        await sweep_logs(self._database, self._all_settings.job_logs)
        await asyncio.sleep(self._all_settings.job_logs.sweep_interval)

    async def _forget_keys(self) -> None:
        async with self._database.transaction() as session:
            await IdempotencyRepository(session).forget_old(_KEYS_AT_ONCE)

    async def _reconcile(self) -> None:
        await self._reconciler.tick()
        if time.monotonic() - self._plans_swept >= _PLANS_SWEEP:
            self._plans_swept = time.monotonic()
            async with self._database.transaction() as session:
                await PlanRepository(session).forget_old()
