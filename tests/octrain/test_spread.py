"""How files of tests are spread over processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.spread import LONG, WAITING, Spread

REPOSITORY = Path(__file__).parents[2]


class Process:
    """What the scheduler knows of a process; ``given`` is what it was told to run, in order."""

    def __init__(self, tests: list[str]) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.tests = tests
        self.given: list[int] = []
        self.done = 0
        self.shutting_down = False

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.given += numbers

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(self.tests[number].split("::")[0] for number in self.given))


def spread(files: dict[str, int], seconds: dict[str, int]) -> list[Process]:
    """Three processes that have run so many tests of each file, of so many seconds each (or 1)."""
    tests = [f"{file}::test_{number}" for file, count in files.items() for number in range(count)]
    processes = [Process(tests) for _ in range(3)]
    config: Any = SimpleNamespace(
        getvalue=lambda name: ["3*popen"], option=SimpleNamespace(loadscopereorder=True)
    )
    scheduler: Any = Spread(config)
    for process in processes:
        scheduler.add_node(process)
    for process in processes:
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    now = [0.0, 0.0, 0.0]
    while any(process.done < len(process.given) for process in processes):
        number = min(
            (i for i in range(3) if processes[i].done < len(processes[i].given)),
            key=lambda i: now[i],
        )
        process = processes[number]
        index = process.given[process.done]
        process.done += 1
        now[number] += seconds.get(tests[index].split("::")[0], 1)
        scheduler.mark_test_complete(process, index)
    assert sorted(index for process in processes for index in process.given) == [*range(len(tests))]
    assert scheduler.tests_finished
    return processes


def test_one_process_takes_the_files_that_wait() -> None:
    waiting = {f"{folder}/test_{name}.py": 2 for folder in reversed(WAITING) for name in "ab"}
    computing = {f"tests/api/test_{number}.py": 4 + number for number in range(8)}
    first, *others = spread({**waiting, **computing}, dict.fromkeys(computing, 3))
    in_order = [f"{folder}/test_{name}.py" for folder in WAITING for name in "ab"]
    assert first.files[: len(waiting)] == in_order
    for process in others:
        assert set(process.files) <= set(computing)


def test_whoever_has_no_files_left_takes_the_others_shortest() -> None:
    waiting = {f"{folder}/test_a.py": 3 for folder in WAITING}
    first, *others = spread({**waiting, "tests/api/test_a.py": 4}, dict.fromkeys(waiting, 50))
    assert first.files[0] == f"{WAITING[0]}/test_a.py"
    assert others[0].files[0] == "tests/api/test_a.py"
    assert others[1].files[0] == f"{WAITING[-1]}/test_a.py"
    # And the other way round.
    computing = {f"tests/api/test_{number}.py": 3 for number in range(9)}
    first, *_ = spread({f"{WAITING[0]}/test_a.py": 3, **computing}, dict.fromkeys(computing, 50))
    assert set(first.files) & set(computing)


def test_the_long_files_are_begun_first() -> None:
    computing = {f"tests/api/test_{number}.py": 4 for number in range(8)}
    first, *others = spread(
        {f"{WAITING[0]}/test_a.py": 30, **computing, **dict.fromkeys(LONG, 2)}, {}
    )
    assert [process.files[0] for process in others] == [*LONG[:2]]
    long = [[file for file in process.files if file in LONG] for process in others]
    assert sorted(file for files in long for file in files) == sorted(LONG)
    assert [
        process.files[: len(files)] for process, files in zip(others, long, strict=True)
    ] == long
    assert not {*first.files} & {*LONG}


def test_what_is_named_is_there() -> None:
    assert [file for file in LONG if not (REPOSITORY / file).is_file()] == []
    assert [folder for folder in WAITING if not any((REPOSITORY / folder).glob("test_*.py"))] == []
