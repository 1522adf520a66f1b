"""``python -m fp8core``: train, convert, plan, validate, spare."""

import sys

from fp8core.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
