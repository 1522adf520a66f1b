"""The `octrain` command."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Run the command; every expected error is one line for a person and an exit status.

    With ``--json`` the error is a JSON object on standard error.
    """
    from pydantic import ValidationError

    from octrain.cli.app import app
    from octrain.cli.exits import Exit, exit_of, members_of
    from octrain.client import OctrainError
    from octrain.local.errors import LocalStackError

    try:
        # By its own name also as `python -m octrain`: completion is installed under it.
        app(prog_name="octrain")
    except OctrainError as error:
        _fail(str(error), error.detail, exit_of(error), members_of(error))
    except ValidationError as error:
        detail = (
            f"The server's answer is not what this version understands ({error.title}: "
            f"{error.error_count()} unexpected value(s)). Is it an Octrain server, and not too old?"
        )
        _fail(detail, detail, Exit.FAILED, {})
    except LocalStackError as error:
        _fail(str(error), str(error), Exit.FAILED, {})
    except OSError as error:
        # A full disk, a folder that may not be written: what the system says is enough.
        _fail(str(error), str(error), Exit.FAILED, {})
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


def _fail(message: str, detail: str, status: int, members: dict[str, object]) -> None:
    if "--json" in sys.argv:
        print(
            json.dumps({"error": {"detail": detail, **members, "exit": int(status)}}, indent=2),
            file=sys.stderr,
        )
    else:
        print(f"octrain: {message}", file=sys.stderr)
    sys.exit(status)
