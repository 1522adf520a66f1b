"""The schema: where its migrations lie, bringing it up, and refusing a wrong one."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.ext.asyncio import AsyncSession

from octrain_api.settings import DatabaseSettings

# Any number of its own: held while one process migrates, the others wait for it.
MIGRATION_LOCK = 0x0C7A11

# A dump that is restored into another server brings numbers of transactions which that server has
# not reached: those events come before all that it will write, as those of older versions do.
_SETTLE_RESTORED_EVENTS = """
    UPDATE events SET transaction_id = 0
    WHERE transaction_id >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint
"""


class SchemaMismatch(RuntimeError):
    """The database's schema is not the one this version needs; the message says the command."""


def migrations_folder() -> Path:
    """The Alembic folder: inside the installed package, else in the checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "migrations", package.parents[1] / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise RuntimeError(f"no migrations beside {package}: the installation is not whole")


def alembic_config() -> Config:
    """Alembic's configuration; the connection is handed over in `attributes`."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    return config


def head_revision() -> str:
    """The schema that this version needs."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head is not None
    return head


def migrate(settings: DatabaseSettings, revision: str = "head") -> None:
    """Bring the database to `revision`, forwards, under an advisory lock. Blocks."""
    engine = create_engine(
        settings.sqlalchemy_url, connect_args={"connect_timeout": settings.connect_timeout}
    )
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": MIGRATION_LOCK})
            connection.commit()
            config = alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
            if revision == "head":
                connection.execute(text(_SETTLE_RESTORED_EVENTS))
            connection.commit()
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": MIGRATION_LOCK})
            connection.commit()
    finally:
        engine.dispose()


async def check_schema(session: AsyncSession) -> None:
    """Raise SchemaMismatch unless the database is at this version's schema."""

    def read(connection: Connection) -> str | None:
        if not inspect(connection).has_table("alembic_version"):
            return None
        revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
        return revision

    current = await (await session.connection()).run_sync(read)
    head = head_revision()
    if current != head:
        state = "has no schema yet" if current is None else f"has schema {current}"
        raise SchemaMismatch(
            f"The database {state}, this version needs {head}. Run `octrain migrate` "
            "(or `python -m octrain_api migrate`), then start again."
        )
