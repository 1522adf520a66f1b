"""The points of the first schema become blocks, and blocks become its chunks again."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import psycopg
from alembic import command

from octrain_api.metrics.repository import MetricRepository
from octrain_api.migrate import alembic_config, migrate
from octrain_api.settings import DatabaseSettings

_JOB = (
    "INSERT INTO jobs (id, owner, labels, notes, priority, spec, status, attempt) "
    "VALUES ('job_1', 'ada', '{}', '', 0, "
    """'{"resources": {"device": "cpu", "gpus": 1}, "recipe": {"engine": "amp"}, "limits": {}}', """
    "'running', 2)"
)
# (attempt, batch) -> name -> steps and values; batch 3 has series of different steps.
CHUNKS = {
    (1, 1): {"a": ([1, 2], [0.1, float("inf")]), "b/c": ([1, 2], [-0.0, 5e-324])},
    (1, 3): {"a": ([3], [1e300]), "b/c": ([2, 3], [2.0, float("-inf")])},
    (2, 5): {"a": ([2], [7.25])},
}


def downgrade(url: str, revision: str) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(DatabaseSettings(url=url).sqlalchemy_url)
    with engine.connect() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
        connection.commit()
    engine.dispose()


def chunks(url: str) -> dict[tuple[int, int], dict[str, tuple[list[int], list[float]]]]:
    found: defaultdict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    with psycopg.connect(url) as connection:
        for attempt, seq, name, steps, values in connection.execute(
            "SELECT s.attempt, c.seq, s.name, c.steps, c.values "
            "FROM metric_chunks c JOIN metric_series s ON s.id = c.series_id"
        ):
            found[attempt, seq][name] = (steps, values)
    return dict(found)


async def test_points_survive_the_way_up_and_down(
    fresh_postgres_url: str, redis_url: str, tmp_path: Path, make_service: Any, job_class: Any
) -> None:
    url = fresh_postgres_url
    migrate(DatabaseSettings(url=url), "0001")
    with psycopg.connect(url) as connection:
        connection.execute(_JOB)
        for (attempt, seq), columns in CHUNKS.items():
            for name, (steps, values) in columns.items():
                row = connection.execute(
                    "INSERT INTO metric_series (job_id, name, attempt) VALUES ('job_1', %s, %s) "
                    "ON CONFLICT (job_id, name, attempt) DO UPDATE SET name = excluded.name "
                    "RETURNING id",
                    [name, attempt],
                ).fetchone()
                assert row is not None
                connection.execute(
                    "INSERT INTO metric_chunks (series_id, seq, job_id, steps, values) "
                    "VALUES (%s, %s, 'job_1', %s, %s)",
                    [row[0], seq, steps, values],
                )
    assert chunks(url) == CHUNKS
    migrate(DatabaseSettings(url=url))
    async for service in make_service(url, redis_url, tmp_path):
        node = service.client(await service.key("operations", "node"))
        job = job_class(service, node, await service.user("ada"), id="job_1")
        async with service.database.session() as session:
            batches = await MetricRepository(session).batches_after("job_1", 0, 99)
        read: defaultdict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
        for batch in batches:
            read[batch.attempt, batch.seq][batch.name] = (batch.steps, batch.values)
        assert dict(read) == CHUNKS
        assert (await job.get(name="a"))["series"] == [
            {"job_id": "job_1", "name": "a", "attempt": 1, "points": [[1, 0.1]]},
            {"job_id": "job_1", "name": "a", "attempt": 2, "points": [[2, 7.25]]},
        ]
        # Blocks that have been joined since come back too.
        await service.sql("UPDATE jobs SET status = 'failed'")
        await service.sql(
            "INSERT INTO attempts (id, job_id, number, node_id, status, fencing_token, device, "
            "gpu_indices, lease_seconds) SELECT 'att_' || n, 'job_1', n, "
            "(SELECT id FROM nodes), 'ended', n, 'cpu', '{}', 1 FROM generate_series(1, 2) n "
            "WHERE EXISTS (SELECT FROM nodes)"
        )
        await job.compact()
    downgrade(url, "0001")
    assert chunks(url) == CHUNKS
