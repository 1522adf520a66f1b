"""Parts of an upload, from the wire into the store.

A part becomes a file of its own, whole and durable, before the database counts it; so what has been
acknowledged is never lost, and two senders of the same part cannot mix their bytes. While bytes
arrive, no connection to the database is held.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect

from octrain_api.artifacts.store import NewFile
from octrain_api.database import Database
from octrain_api.datasets.places import folder_url, new_part_name
from octrain_api.datasets.repository import DatasetRepository
from octrain_api.models import Dataset
from octrain_api.problems import Problem, conflict, not_found
from octrain_api.settings import Settings

# Written to the disk at one time: small enough to hold in memory for each sender.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Received:
    """How far an upload is."""

    offset: int
    size: int


async def receive_part(
    database: Database,
    settings: Settings,
    owner: str | None,
    dataset_id: str,
    offset: int,
    chunks: AsyncIterator[bytes],
) -> Received:
    """Store what comes as the bytes from `offset` on; how far the upload is then.

    What has been read when the sender hangs up is kept. Raises Problem 404, 409 for another offset
    than the next one, 413 for bytes beyond the announced size.
    """
    async with database.transaction() as session:
        dataset = await DatasetRepository(session).get(dataset_id, owner)
        _check(dataset, dataset_id, offset)
        assert dataset is not None
        if await DatasetRepository(session).count_parts(dataset_id) >= settings.datasets.max_parts:
            raise conflict(
                "too-many-parts",
                f"An upload has {settings.datasets.max_parts} parts at most: send larger ones.",
            )
    name = new_part_name(offset)
    file = await asyncio.to_thread(
        NewFile, folder_url(settings.storage.artifact_url, dataset), name
    )
    try:
        with contextlib.suppress(ClientDisconnect):
            await _write(file, chunks, dataset.size - offset)
        if not file.size:
            await asyncio.to_thread(file.discard)
            return Received(offset, dataset.size)
        await asyncio.to_thread(file.finish)
        return await _count(database, owner, dataset_id, offset, name, file.size)
    except BaseException:
        await asyncio.to_thread(file.discard)
        raise


def _check(dataset: Dataset | None, dataset_id: str, offset: int) -> None:
    if dataset is None:
        raise not_found("data set", dataset_id)
    if dataset.status != "uploading":
        raise conflict(
            "upload-complete",
            f"This data set is {dataset.status}: all its bytes have been received.",
            upload_offset=dataset.received,
        )
    if dataset.received != offset:
        raise conflict(
            "wrong-offset",
            f"{dataset.received} bytes are stored: the next part begins there, not at {offset}.",
            upload_offset=dataset.received,
        )


async def _write(file: NewFile, chunks: AsyncIterator[bytes], most: int) -> None:
    """Write in blocks; what arrived before the sender hung up is written too."""
    block = bytearray()
    try:
        async for chunk in chunks:
            block += chunk
            if file.size + len(block) > most:
                block.clear()
                raise Problem(
                    413,
                    "upload-too-long",
                    "Upload too long",
                    f"{most} bytes are missing from here to the size that was announced; more "
                    "came. Nothing of this part was stored.",
                )
            if len(block) >= _BLOCK:
                await asyncio.to_thread(file.write, bytes(block))
                block.clear()
    finally:
        if block:
            await asyncio.to_thread(file.write, bytes(block))


async def _count(
    database: Database, owner: str | None, dataset_id: str, offset: int, name: str, size: int
) -> Received:
    """Make a stored part one of the upload's, if it is still the next one."""
    async with database.transaction() as session:
        datasets = DatasetRepository(session)
        dataset = await datasets.lock(dataset_id, owner)
        _check(dataset, dataset_id, offset)
        assert dataset is not None
        await datasets.add_part(dataset, name, size)
        if dataset.received == dataset.size:
            dataset.status = "checking"
        return Received(dataset.received, dataset.size)
