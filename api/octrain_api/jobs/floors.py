"""From which number on a job's stream can be told in full."""

from collections.abc import Mapping

from sqlalchemy import update

from octrain_api.database import Database
from octrain_api.models import Job


async def raise_floors(database: Database, floors: Mapping[str, int]) -> None:
    """Whoever would go on below these numbers is told to read anew, from now on.

    To be called before what is below is removed, and outside of that transaction: a job's row is
    what its writers wait for, so it is held for the moment of one statement.
    """
    for job_id, floor in floors.items():
        async with database.transaction() as session:
            await session.execute(
                update(Job)
                .where(Job.id == job_id, Job.stream_floor < floor)
                .values(stream_floor=floor)
            )
