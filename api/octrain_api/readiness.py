"""Whether the service can do its work: each part asked for real, and none more than it can bear."""

import asyncio
import time
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.broker import tls_options
from octrain_api.clocks import CONTROLLER
from octrain_api.database import Database
from octrain_api.migrate import SchemaMismatch, check_schema
from octrain_api.settings import Settings

OK = "ok"
# What stops this process from serving; the others are told, and the service goes on degraded.
_FATAL = ("database", "schema")
_BROKER_SECONDS = 5.0


@dataclass(frozen=True)
class Findings:
    """What was found of each part: `ok`, or what is wrong."""

    checks: dict[str, str]

    @property
    def can_serve(self) -> bool:
        """Whether requests can be answered and jobs be stored."""
        return all(self.checks[name] == OK for name in _FATAL)

    @property
    def status(self) -> str:
        """ready, degraded (jobs are taken, but may wait), or not ready."""
        if not self.can_serve:
            return "not ready"
        return "ready" if all(found == OK for found in self.checks.values()) else "degraded"


class Readiness:
    """Asks the database at each call, and the broker once in five seconds; one call at a time, so
    that an open route cannot be used to wear them out."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._asking = asyncio.Lock()
        self._broker = OK
        self._broker_at = float("-inf")

    async def check(self) -> Findings:
        """Ask every part."""
        async with self._asking:
            checks = await self._check_database()
            if time.monotonic() - self._broker_at > _BROKER_SECONDS:
                self._broker = await self._check_broker()
                self._broker_at = time.monotonic()
            return Findings(checks | {"broker": self._broker})

    async def _check_database(self) -> dict[str, str]:
        checks = {"database": OK, "schema": OK, "controller": OK}
        try:
            async with self._database.session() as session:
                try:
                    await check_schema(session)
                except SchemaMismatch as error:
                    return checks | {"schema": str(error), "controller": "unknown"}
                # A read of the table that every job is in, by the way that submissions take.
                await session.execute(text("SELECT id FROM jobs ORDER BY created_at DESC LIMIT 1"))
                silence = await session.scalar(
                    text(
                        "SELECT CAST(extract(epoch FROM now() - alive_at) AS float8) "
                        "FROM service_clocks WHERE name = :name"
                    ),
                    {"name": CONTROLLER},
                )
        except (SQLAlchemyError, OSError):
            return {
                "database": "cannot be reached",
                "schema": "unknown",
                "controller": "unknown",
            }
        tolerance = self._settings.controller.downtime_tolerance
        if silence is None:
            checks["controller"] = "has never been heard: jobs are taken, but none is placed"
        elif silence > tolerance:
            checks["controller"] = f"not heard for {silence:.0f} s: no job is placed meanwhile"
        return checks

    async def _check_broker(self) -> str:
        broker = self._settings.broker
        client = Redis.from_url(
            broker.url, socket_connect_timeout=1.0, socket_timeout=1.0, **tls_options(broker)
        )
        try:
            await client.ping()
        except (RedisError, OSError, ValueError):
            return "cannot be reached: placed jobs begin once their node asks for them"
        finally:
            await client.aclose()
        return OK
