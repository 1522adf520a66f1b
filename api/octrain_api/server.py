"""The HTTP server around the application: its sockets, TLS and orderly end."""

import asyncio
from typing import Any

import uvicorn
from fastapi import FastAPI

from octrain_api.collection import spare_what_stays
from octrain_api.connections import bounded_protocol
from octrain_api.database import Database
from octrain_api.migrate import check_schema
from octrain_api.settings import HttpSettings, Settings


class Server(uvicorn.Server):
    """uvicorn's server, which ends open streams before it waits for the connections."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: Any = None) -> None:
        """End the streams first: uvicorn would wait for them."""
        self._app.state.context.listener.close()
        await super().shutdown(sockets)


def make_server(app: FastAPI, settings: HttpSettings, host: str, port: int) -> Server:
    """A server of the application, with TLS where the settings name a certificate."""
    password = settings.tls_key_password
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=bounded_protocol(settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_timeout,
        timeout_graceful_shutdown=5,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_keyfile_password=password.get_secret_value() if password is not None else None,
    )
    return Server(config, app)


def serve(settings: Settings, host: str, port: int) -> int:
    """Serve until a signal ends it; the exit status. Raises SchemaMismatch."""
    from octrain_api.app import create_app

    async def check() -> None:
        database = Database(settings.database)
        try:
            async with database.session() as session:
                await check_schema(session)
        finally:
            await database.close()

    asyncio.run(check())
    server = make_server(create_app(settings), settings.http, host, port)
    spare_what_stays()
    server.run()
    return 0 if server.started else 1
