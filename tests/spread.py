"""How files of tests are spread over processes: one process takes those that mostly wait.

A test of the whole service waits for leases and for processes to start; a test of a computation
keeps a core busy. Where every process may take either, all of them wait at one time now and then,
and each of them starts every kind of stack that there is.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["LONG", "WAITING", "Spread"]

# Folders, those whose files take longest first.
WAITING = ("tests/faults", "tests/chaos", "tests/e2e", "tests/docker", "tests/dashboard")
# Of few tests, which keep a core busy for long: begun last, they would be waited for by all.
LONG = (
    "tests/api/state_machine/test_state_machine.py",
    "tests/api/test_contract.py",
    "tests/benchmarks/test_service.py",
    "tests/benchmarks/test_training_rows.py",
    "tests/fp8core/training/test_stop_while_waiting.py",
    "tests/fp8core/test_learning.py",
    "tests/fp8core/test_minilm.py",
)


class Spread(LoadFileScheduling):
    """A file at a time to each process, as with ``--dist loadfile``: to the first process those
    that wait, to the others those that compute, the long ones and those of many tests first.
    Whoever has none left takes the others', the shortest that wait first.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        waiting = sorted((file for file in self.workqueue if _waits(file)), key=_place)
        computing = [file for file in self.workqueue if not _waits(file)]
        computing.sort(key=lambda file: file not in LONG)
        if node is self.nodes[0]:
            order = [*waiting, *computing]
        else:
            order = [*computing, *reversed(waiting)]
        self.workqueue.move_to_end(order[0], last=False)
        super()._assign_work_unit(node)


def _folder(file: str) -> str:
    return str(PurePosixPath(file).parent)


def _waits(file: str) -> bool:
    return _folder(file) in WAITING


def _place(file: str) -> int:
    return WAITING.index(_folder(file))
