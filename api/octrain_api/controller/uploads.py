"""Uploads behind the scenes: checks of complete ones, and the removal of what nobody needs.

A check reads every byte, so it is a process of its own and of low priority: neither its processor
time nor its memory is this process's.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from dataclasses import asdict
from typing import Any

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from octrain_api.artifacts import store
from octrain_api.database import Database, database_now
from octrain_api.datasets.check import Order
from octrain_api.datasets.places import content_name, folder_url
from octrain_api.datasets.repository import DatasetRepository
from octrain_api.models import Dataset
from octrain_api.settings import Settings

log = logging.getLogger("octrain_api.uploads")

# A controller that died leaves its check to be begun anew after so long.
_CLAIM_SECONDS = 60.0
_RENEW_SECONDS = 15.0
_AT_ONCE = 20
# What the checking process has no use for.
_KEPT_BACK = ("DATABASE_URL", "REDIS_URL")


class CheckFailed(Exception):
    """The check could not be made; nothing is said of the data."""


class Uploads:
    """Checks what is complete; expires what stays unfinished, and removes what is deleted."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def clean(self) -> None:
        """Give the room back that uploads no longer need."""
        settings = self._settings.datasets
        async with self._database.transaction() as session:
            datasets = DatasetRepository(session)
            expired = await datasets.expire("uploading", settings.expire_after)
            await datasets.expire("invalid", settings.keep_invalid)
        if expired:
            log.info("%d unfinished upload(s) expired", expired)
        await self._remove_parts()
        await self._remove_deleted()

    async def check(self) -> None:
        """Check complete uploads until none is left."""
        while await self._check_next():
            pass

    async def _check_next(self) -> bool:
        """Check the oldest complete upload; whether there was one."""
        async with self._database.transaction() as session:
            datasets = DatasetRepository(session)
            dataset = await datasets.claim_check(_CLAIM_SECONDS)
            if dataset is None:
                return False
            parts = [part.name for part in await datasets.parts(dataset.id)]
        order = Order(
            url=folder_url(self._settings.storage.artifact_url, dataset),
            parts=parts,
            content=content_name(dataset),
            size=dataset.size,
            sha256=dataset.sha256,
            media=dataset.media,
            format=dataset.format,
            columns=dataset.columns,
        )
        try:
            findings = await self._run(dataset, order)
        except CheckFailed as error:
            # The claim stays until it runs out: a store that is away is not asked every second.
            log.error("data set %s could not be checked, trying again: %s", dataset.id, error)
            return True
        except BaseException:
            with contextlib.suppress(SQLAlchemyError, OSError):
                async with self._database.transaction() as session:
                    await DatasetRepository(session).release_check(dataset.id)
            raise
        await self._record(dataset.id, findings)
        return True

    async def _run(self, dataset: Dataset, order: Order) -> dict[str, Any]:
        environment = {k: v for k, v in os.environ.items() if k not in _KEPT_BACK}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octrain_api.datasets.check",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        renewing = asyncio.create_task(self._renew(dataset.id))
        try:
            out, err = await process.communicate(json.dumps(asdict(order)).encode())
        finally:
            renewing.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            last = err.decode(errors="replace").strip().splitlines()[-1:]
            raise CheckFailed(f"exit {process.returncode}: {' '.join(last)}")
        findings: dict[str, Any] = json.loads(out)
        return findings

    async def _renew(self, dataset_id: str) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            try:
                async with self._database.transaction() as session:
                    await DatasetRepository(session).renew_check(dataset_id, _CLAIM_SECONDS)
            except (SQLAlchemyError, psycopg.Error, OSError) as error:
                log.warning("cannot renew the check of %s: %s", dataset_id, error)

    async def _record(self, dataset_id: str, findings: dict[str, Any]) -> None:
        async with self._database.transaction() as session:
            dataset = await DatasetRepository(session).lock(dataset_id, None)
            if dataset is None:
                # Deleted meanwhile; what the check wrote goes with the rest.
                await DatasetRepository(session).release_check(dataset_id)
                return
            dataset.status = "invalid" if findings["problem_count"] else "ready"
            dataset.rows = findings["rows"]
            dataset.problem_count = findings["problem_count"]
            dataset.problems = findings["problems"]
            dataset.claimed_until = None
            dataset.checked_at = dataset.updated_at = await database_now(session)
        log.info("data set %s is %s", dataset_id, dataset.status)

    async def _remove_parts(self) -> None:
        """Free the room of parts: the content stands by itself, or is of no use."""
        async with self._database.session() as session:
            done = await DatasetRepository(session).with_needless_parts(_AT_ONCE)
        for dataset in done:
            folder = folder_url(self._settings.storage.artifact_url, dataset)
            await asyncio.to_thread(store.remove, folder, "parts")
            if dataset.status == "invalid":
                await asyncio.to_thread(store.remove, folder, content_name(dataset))
            async with self._database.transaction() as session:
                await DatasetRepository(session).forget_parts(dataset.id)

    async def _remove_deleted(self) -> None:
        async with self._database.session() as session:
            deleted = await DatasetRepository(session).deleted(_AT_ONCE)
        for dataset in deleted:
            folder = folder_url(self._settings.storage.artifact_url, dataset)
            await asyncio.to_thread(store.remove, folder)
            async with self._database.transaction() as session:
                await DatasetRepository(session).remove_row(dataset.id)
            log.info("data set %s is removed", dataset.id)
