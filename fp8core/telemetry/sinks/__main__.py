"""``python -m fp8core.telemetry.sinks KIND``: one sink's process, started by a trainer."""

import sys

from fp8core.telemetry.sinks.process import run_sink

if __name__ == "__main__":
    sys.exit(run_sink(sys.argv[1]))
