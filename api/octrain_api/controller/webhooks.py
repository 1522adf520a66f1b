"""The delivery of webhooks, apart from the controller's other loops.

It runs in a thread with an event loop and a connection pool of its own: a slow endpoint, a slow DNS
server or ten thousand messages cost scheduler, relay and reconciler nothing but processor time.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.controller.webhook_queue import Due, Parcel, WebhookQueue
from octrain_api.database import Database
from octrain_api.listener import wait_for
from octrain_api.settings import Settings, WebhookSettings
from octrain_api.tasks import end_tasks
from octrain_api.webhooks.repository import WEBHOOK_CHANNEL
from octrain_api.webhooks.sender import Outcome, Sender
from octrain_api.webhooks.signing import signed_headers

log = logging.getLogger("octrain_api.webhooks")

_CONNECTIONS = 4
# Beyond the timeout of a request: reading the excerpt and writing down what came of it.
_CLAIM_MARGIN = 10.0
_CLEANING_PAUSE = 60.0
_LAST_WORDS = 2.0
_AGENT = "Octrain-Webhooks/1"


async def deliver_for_ever(settings: Settings) -> None:
    """Deliver in a thread of its own until cancelled."""
    while True:
        try:
            await _in_own_thread(Deliveries(settings))
        except Exception:
            # Whatever it is, the other loops go on.
            log.exception("the delivery of webhooks ended, beginning anew")
        await asyncio.sleep(settings.controller.tick)


async def _in_own_thread(deliveries: "Deliveries") -> None:
    thread = ThreadPoolExecutor(1, "webhooks")
    running = asyncio.get_running_loop().run_in_executor(
        thread, lambda: asyncio.run(deliveries.run())
    )
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        deliveries.stop()
        await running
        raise
    finally:
        thread.shutdown(wait=False)


def choose(
    due: Sequence[Due], busy: Mapping[str, int], busy_failing: int, settings: WebhookSettings
) -> list[Due]:
    """Which deliveries to begin, given how many of each endpoint are under way.

    An endpoint that fails gets one at a time, and all that fail together get half of the room: so
    the others always find some.
    """
    counts = Counter(busy)
    room = settings.concurrency - sum(busy.values())
    room_failing = settings.concurrency // 2 - busy_failing
    chosen = []
    for each in due:
        if room <= 0:
            break
        most = 1 if each.failing else settings.concurrency_per_endpoint
        if counts[each.webhook_id] >= most or (each.failing and room_failing <= 0):
            continue
        counts[each.webhook_id] += 1
        room -= 1
        room_failing -= each.failing
        chosen.append(each)
    return chosen


class Deliveries:
    """The loop: events to deliveries, deliveries to endpoints, results to the database."""

    def __init__(self, settings: Settings, sender: Sender | None = None) -> None:
        self._settings = settings.webhooks
        self._tick = settings.controller.tick
        pool = settings.database.model_copy(
            update={"pool_size": _CONNECTIONS, "max_overflow": _CONNECTIONS}
        )
        self._database = Database(pool, "octrain-webhooks")
        self._sender = sender
        self._under_way: dict[str, tuple[Due, asyncio.Task[None]]] = {}
        self._cleaned_at = 0.0
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """Ask `run` to end; from any thread."""
        self._stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self) -> None:
        """Deliver until `stop`."""
        self._loop = asyncio.get_running_loop()
        sender = self._sender or Sender(self._settings)
        helpers = [asyncio.create_task(self._listen()), asyncio.create_task(self._stop.wait())]
        try:
            while not (self._stopping or self._stop.is_set()):
                try:
                    await self.tick(sender)
                except (SQLAlchemyError, psycopg.Error, OSError) as error:
                    log.warning("delivering webhooks failed, trying again: %s", error)
                except Exception:
                    # One bad row must not stop the service of all the others.
                    log.exception("delivering webhooks failed, trying again")
                await self._rest(helpers[1])
        finally:
            await end_tasks(helpers)
            await self._let_go()
            await sender.close()
            await self._database.close()

    async def tick(self, sender: Sender) -> None:
        """Take what is new, begin what is due, and now and then forget what is old."""
        while True:
            async with self._database.transaction() as session:
                if not await WebhookQueue(session, self._settings).fan_out():
                    break
        await self._begin(sender)
        if time.monotonic() - self._cleaned_at >= _CLEANING_PAUSE:
            async with self._database.transaction() as session:
                queue = WebhookQueue(session, self._settings)
                await queue.give_up_old()
                await queue.forget_old()
            self._cleaned_at = time.monotonic()

    async def settle(self) -> None:
        """Wait until what is under way has been written down."""
        while self._under_way:
            await asyncio.wait([task for _, task in self._under_way.values()])

    async def _begin(self, sender: Sender) -> None:
        under_way = [due for due, _ in self._under_way.values()]
        busy = Counter(due.webhook_id for due in under_way)
        if len(under_way) >= self._settings.concurrency:
            return
        async with self._database.transaction() as session:
            queue = WebhookQueue(session, self._settings)
            due = await queue.due(self._settings.concurrency_per_endpoint)
            failing = sum(each.failing for each in under_way)
            chosen = choose(due, busy, failing, self._settings)
            if not chosen:
                return
            claim = self._settings.timeout + _CLAIM_MARGIN
            parcels = await queue.claim(chosen, claim)
        known = {due.delivery_id: due for due in chosen}
        for parcel in parcels:
            task = asyncio.create_task(self._deliver(sender, parcel))
            self._under_way[parcel.delivery_id] = known[parcel.delivery_id], task

    async def _deliver(self, sender: Sender, parcel: Parcel) -> None:
        try:
            body = parcel.body.encode()
            headers = {
                "Content-Type": "application/json; charset=utf-8",
                "User-Agent": _AGENT,
                "Accept-Encoding": "identity",
                # A receiver's clock is compared with this one, so it is the wall's.
                **signed_headers(parcel.keys, parcel.message_id, int(time.time()), body),
            }
            outcome = await sender.post(parcel.url, body, headers)
            if not outcome.ok:
                log.info(
                    "webhook %s did not take %s: %s",
                    parcel.webhook_id,
                    parcel.message_id,
                    outcome.error,
                )
            await self._record(parcel, outcome)
        finally:
            del self._under_way[parcel.delivery_id]
            self._wake.set()

    async def _record(self, parcel: Parcel, outcome: Outcome) -> None:
        try:
            async with self._database.transaction() as session:
                await WebhookQueue(session, self._settings).record(parcel, outcome)
        except (SQLAlchemyError, OSError) as error:
            # The claim runs out, and the message is sent once more: at least once is the promise.
            log.warning("cannot note the delivery of %s: %s", parcel.message_id, error)

    async def _listen(self) -> None:
        """Wake the loop when there is something new, reconnecting for ever."""
        while True:
            try:
                async with await self._database.connect() as connection:
                    await connection.execute(f"LISTEN {WEBHOOK_CHANNEL}")
                    self._wake.set()
                    async for _ in connection.notifies():
                        self._wake.set()
            except (psycopg.Error, OSError) as error:
                log.warning("listening to the database failed, trying again: %s", error)
                await asyncio.sleep(1)

    async def _rest(self, stopped: asyncio.Task[Any]) -> None:
        """Wait for something to do: a wake-up, the next tick, or the end."""
        waiting = asyncio.create_task(wait_for(self._wake, self._tick))
        await asyncio.wait([waiting, stopped], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    async def _let_go(self) -> None:
        """A moment for what is nearly done; then the claims are given up."""
        tasks = {due.delivery_id: task for due, task in self._under_way.values()}
        if not tasks:
            return
        await asyncio.wait(tasks.values(), timeout=_LAST_WORDS)
        left = [delivery_id for delivery_id, task in tasks.items() if not task.done()]
        await end_tasks(tasks.values())
        with contextlib.suppress(SQLAlchemyError, OSError):
            async with self._database.transaction() as session:
                await WebhookQueue(session, self._settings).release(left)
