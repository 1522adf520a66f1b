"""The `octrain` command."""

from __future__ import annotations

import sys

EXIT_STACK = 1
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_JOB_NOT_SUCCEEDED = 5
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command; every expected error is one line for a person and an exit code."""
    from octrain.cli.app import app
    from octrain.client.errors import OctrainError, ServerUnreachable
    from octrain.local.errors import LocalStackError

    try:
        app()
    except ServerUnreachable as error:
        _fail(str(error), EXIT_UNREACHABLE)
    except OctrainError as error:
        # Status 0: nobody was asked, because no server is known.
        _fail(str(error), EXIT_REFUSED if error.status else EXIT_UNREACHABLE)
    except LocalStackError as error:
        _fail(str(error), EXIT_STACK)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _fail(message: str, status: int) -> None:
    print(f"octrain: {message}", file=sys.stderr)
    sys.exit(status)
