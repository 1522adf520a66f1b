"""Alembic's environment: the connection comes from whoever runs it, else from DATABASE_URL."""

from alembic import context
from sqlalchemy import Connection, create_engine

from octrain_api.models import Base
from octrain_api.settings import DatabaseSettings


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        compare_type=True,
        compare_server_default=True,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def _main() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _run(connection)
        return
    engine = create_engine(DatabaseSettings().sqlalchemy_url)
    with engine.connect() as connection:
        _run(connection)
    engine.dispose()


_main()
