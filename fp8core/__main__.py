"""``python -m fp8core``: train, convert, plan, validate, spare."""

import contextlib
import os
import sys

from fp8core.commands.cli import main


def _still_reading() -> bool:
    prefetch = sys.modules.get("fp8core.data.prefetch")  # not imported for its own sake
    return prefetch is not None and bool(prefetch.is_still_reading())


if __name__ == "__main__":
    code = main()
    if _still_reading():
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
