"""torchrun, with its account of the ranks that failed written down.

``python -m fp8core.training.ranks.agent N ARGUMENTS...`` is ``python -m torch.distributed.run
--standalone --nproc-per-node N -m fp8core ARGUMENTS...``, of which nothing would be left in the end
but an exit code of 1 and a table for people.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from fp8core.training.ranks.place import FOLDER_VARIABLE, die_with_parent

__all__ = ["FAILURES", "main"]

FAILURES = "failures.json"
"""In the ranks' folder: a list of ``rank``, ``exit_code`` (negative: the signal), ``time``."""

# From the failure of a rank to SIGKILL of the others, where the launcher does not come first.
_SHUTDOWN_SECONDS = 5


def main(arguments: Sequence[str]) -> int:
    """Runs the ranks; 0 when all of them ended with 0, else 1."""
    die_with_parent()
    folder = Path(os.environ[FOLDER_VARIABLE])
    ranks, *command = arguments
    parsed = parse_args(
        [
            *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", ranks),
            *("--max-restarts", "0", "--tee", "3", "--log-dir", str(folder / "logs")),
            *("-m", "fp8core", *command),
        ]
    )
    # A request to stop is the launcher's to pass on: torchrun would kill ranks that are saving.
    parsed.signals_to_handle = "SIGQUIT"
    parsed.shutdown_timeout = _SHUTDOWN_SECONDS
    signal.signal(signal.SIGTERM, _to_the_launcher)
    signal.signal(signal.SIGINT, _to_the_launcher)
    try:
        run(parsed)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        partial = folder / f".{FAILURES}"
        partial.write_text(json.dumps(failures))
        partial.replace(folder / FAILURES)
        return 1
    return 0


def _to_the_launcher(number: int, frame: FrameType | None) -> None:
    os.kill(os.getppid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
