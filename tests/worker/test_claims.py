"""Answers of the API by which a supervisor could lose its attempt, or keep it for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fp8core.stored_json import read_json
from octrain_worker.supervisor.closing import ExitStatus
from octrain_worker.supervisor.process_tree import read_process

LONG = {"steps": 9999, "step_seconds": 0.02}


def alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.dead


def test_a_claim_without_an_answer_is_a_successors(workplace: Any) -> None:
    """The API has it claimed: who gave it up would leave it there until its lease ends."""
    attempt = workplace.api.add("att_a", {"steps": 3})
    workplace.environment["OCTRAIN_SUPERVISOR_CLAIM_PATIENCE_SECONDS"] = "0.3"
    workplace.api.lose_answers = 1_000_000
    assert workplace.supervise("att_a").wait(timeout=30) == ExitStatus.LEFT_FOR_SUCCESSOR
    assert attempt.supervisor is not None
    workplace.api.lose_answers = 0
    assert workplace.supervise("att_a").wait(timeout=30) == ExitStatus.DONE, workplace.log()
    assert attempt.finished["outcome"] == "succeeded"


def test_a_claim_that_is_refused_leaves_nothing(workplace: Any) -> None:
    assert workplace.supervise("att_unknown").wait(timeout=30) == ExitStatus.NOT_OURS
    assert not workplace.folder("att_unknown").path.exists()


def test_an_attempt_that_the_api_no_longer_knows_is_stopped(
    workplace: Any, until: Callable[..., Any]
) -> None:
    """Its database is of before: the GPU may be another's, and the end can be told to nobody."""
    attempt = workplace.api.add("att_a", LONG)
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "the first step")
    trainers = workplace.trainer_processes("att_a")
    assert trainers
    del workplace.api.attempts["att_a"]
    assert child.wait(timeout=20) == ExitStatus.NOT_OURS, workplace.log()
    assert not [pid for pid in trainers if alive(pid)]
    assert read_json(workplace.folder("att_a").finished)["how"] == "disowned"


def test_a_page_that_is_not_found_is_no_word_of_the_api(
    workplace: Any, until: Callable[..., Any]
) -> None:
    """So a proxy answers that has lost its way to the API."""
    attempt = workplace.api.add("att_a", {"steps": 60, "step_seconds": 0.02})
    child = workplace.supervise("att_a")
    until(lambda: attempt.steps, "the first step")
    workplace.api.not_found = {}
    asked = len(workplace.api.requests)
    del workplace.api.attempts["att_a"]
    until(lambda: len(workplace.api.requests) > asked + 2, "requests that find nothing")
    workplace.api.attempts["att_a"] = attempt
    assert child.wait(timeout=30) == ExitStatus.DONE, workplace.log()
    assert attempt.finished["outcome"] == "succeeded"
    assert attempt.steps == list(range(1, 61))


def test_an_end_that_the_api_does_not_understand_is_told_in_plain_words(workplace: Any) -> None:
    """An API older than the worker has not all its reasons; the attempt must end all the same."""
    attempt = workplace.api.add("att_a", {"steps": 3, "fail_with": ["data_invalid", 4]})
    workplace.api.unknown_reasons = {"data_invalid"}
    assert workplace.supervise("att_a").wait(timeout=30) == ExitStatus.DONE, workplace.log()
    assert attempt.finished["outcome"] == "failed"
    assert attempt.finished["reason"] == "internal_error"
    assert attempt.finished["resumable"] is False
    assert attempt.finished["step"] is None
    assert attempt.finished["detail"].startswith("data_invalid: as the script says")
    assert "/reason: data_invalid is none" in attempt.finished["detail"]


def test_supervise_takes_no_other_folder(workplace: Any) -> None:
    victim = workplace.data.parent / "victim"
    victim.mkdir()
    (victim / "kept").write_text("x")
    assert workplace.supervise("../../victim").wait(timeout=30) not in set(ExitStatus)
    assert os.listdir(victim) == ["kept"]
    assert "'../../victim' is not the id of an attempt" in workplace.log()
