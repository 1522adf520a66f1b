"""Pauses between the starts of a process that keeps ending."""

from __future__ import annotations

from octrain.local.restarts import LONGEST_PAUSE, STABLE_SECONDS, Decision, Restarts


def test_pauses_double_up_to_a_bound_and_are_forgotten_when_it_stays() -> None:
    restarts = Restarts({"api": 0.0})
    assert restarts.look("api", True, 1.0) == Decision()
    now, pauses = 1.0, []
    for _ in range(9):
        found = restarts.look("api", False, now)
        assert found.pause is not None
        pauses.append(found.pause)
        assert restarts.look("api", False, now + found.pause - 0.01) == Decision()
        now += found.pause
        assert restarts.look("api", False, now) == Decision(start=True)
    assert pauses[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE]
    assert set(pauses[6:]) == {LONGEST_PAUSE}
    assert restarts.look("api", True, now + STABLE_SECONDS - 1) == Decision()
    assert restarts.look("api", True, now + STABLE_SECONDS + 1) == Decision()
    assert restarts.look("api", False, now + STABLE_SECONDS + 2).pause == 0.5


def test_processes_are_counted_apart() -> None:
    restarts = Restarts({"api": 0.0, "worker-a": 0.0})
    assert restarts.look("api", False, 1.0).pause == 0.5
    assert restarts.look("api", False, 2.0).start
    assert restarts.look("worker-a", False, 2.0).pause == 0.5
    assert restarts.look("api", False, 3.0).pause == 1.0
