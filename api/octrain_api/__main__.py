"""`python -m octrain_api serve|controller|migrate|create-key|create-node-token|problems`."""

import argparse
import asyncio
import json
import sys
from typing import TextIO

from octrain_api.observability.logs import configure
from octrain_api.settings import Settings

SCOPES = ("jobs:read", "jobs:write", "admin", "node")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m octrain_api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the HTTP API")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    commands.add_parser("controller", help="run the scheduler, the relay and the reconciler")
    commands.add_parser("migrate", help="bring the database's schema to this version")
    create = commands.add_parser("create-key", help="make an API key and print it as JSON")
    create.add_argument("--name", required=True)
    create.add_argument("--owner", required=True)
    create.add_argument("--migrate", action="store_true", help="as the command does, first")
    create.add_argument("--scopes", required=True, help=f"of {', '.join(SCOPES)}; by commas")
    token = commands.add_parser(
        "create-node-token", help="make a one-time token with which a node enrols; JSON"
    )
    token.add_argument("--owner", required=True)
    token.add_argument("--node", help="the only node it is for; its former key is then revoked")
    token.add_argument("--expires-in", type=int, default=3600, help="seconds; default: 3600")
    commands.add_parser("problems", help="print the page of problem types")
    options = parser.parse_args(arguments)
    if options.command == "problems":
        from octrain_api.problem_kinds import markdown

        print(markdown(), end="")
        return 0
    try:
        return _run(options)
    except Exception as error:
        from octrain_api.faults import told

        if (fault := told(error)) is None:
            raise
        print(fault.message, file=sys.stderr)
        return fault.status


def _run(options: argparse.Namespace) -> int:
    settings = Settings()
    configure(settings.logs)
    match options.command:
        case "serve":
            return _serve(settings, options.host, options.port)
        case "controller":
            return _controller(settings)
        case "migrate":
            return _migrate(settings)
        case "create-node-token":
            return _create_token(settings, options.owner, options.node, options.expires_in)
        case _:
            if options.migrate:
                _migrate(settings, sys.stderr)
            return _create_key(settings, options.name, options.owner, options.scopes)


def _serve(settings: Settings, host: str, port: int) -> int:
    from octrain_api.collection import collect_nothing_yet

    collect_nothing_yet()
    from octrain_api.server import serve

    return serve(settings, host, port)


def _controller(settings: Settings) -> int:
    from octrain_api.collection import collect_nothing_yet, spare_what_stays

    collect_nothing_yet()
    from octrain_api.controller.main import run

    spare_what_stays()
    asyncio.run(run(settings))
    return 0


def _migrate(settings: Settings, output: TextIO | None = None) -> int:
    from octrain_api.migrate import head_revision, migrate

    migrate(settings.database)
    print(f"the database is at schema {head_revision()}", file=output)
    return 0


def _create_key(settings: Settings, name: str, owner: str, scopes: str) -> int:
    from octrain_api.database import Database
    from octrain_api.keys.schemas import KeyRequest
    from octrain_api.keys.service import KeyService
    from octrain_api.migrate import check_schema

    wanted = [scope.strip() for scope in scopes.split(",") if scope.strip()]
    unknown = sorted(set(wanted) - set(SCOPES))
    if unknown or not wanted:
        print(
            f"no such scope: {', '.join(unknown)}; there are {', '.join(SCOPES)}", file=sys.stderr
        )
        return 2
    request = KeyRequest.model_validate({"name": name, "owner": owner, "scopes": wanted})

    async def make() -> dict[str, str]:
        database = Database(settings.database)
        try:
            async with database.transaction() as session:
                await check_schema(session)
                key = await KeyService(session).create(request)
        finally:
            await database.close()
        return {"id": key.id, "key": key.key}

    print(json.dumps(asyncio.run(make())))
    return 0


def _create_token(settings: Settings, owner: str, node: str | None, expires_in: int) -> int:
    from pydantic import ValidationError

    from octrain_api.database import Database
    from octrain_api.keys.enrolment import EnrolmentService
    from octrain_api.keys.schemas import TokenRequest
    from octrain_api.migrate import check_schema

    try:
        request = TokenRequest(node=node, owner=owner, expires_in_seconds=expires_in)
    except ValidationError as error:
        print("; ".join(str(e["msg"]) for e in error.errors()), file=sys.stderr)
        return 2

    async def make() -> dict[str, str]:
        database = Database(settings.database)
        try:
            async with database.transaction() as session:
                await check_schema(session)
                token = await EnrolmentService(session).create(request, owner)
        finally:
            await database.close()
        return {"id": token.id, "token": token.token, "expires_at": token.expires_at.isoformat()}

    print(json.dumps(asyncio.run(make())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
