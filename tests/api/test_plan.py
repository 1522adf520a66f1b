"""One tick's plan, without a database: which node, in which order, and the words for why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octrain_api.controller.placement import Need, need_of, never_fits
from octrain_api.controller.plan import DRAINED, NOT_HEARD, NodeView, Plan, Registry, Room

OK = {"ok": True}


def _node(name: str, gpus: int = 0, cpu_slots: int = 1, **more: Any) -> NodeView:
    kinds = ["cpu", "cuda"] if gpus else ["cpu"]
    engines = {"emulated": OK, "te": OK} if gpus else {"emulated": OK}
    values: dict[str, Any] = {
        "id": f"node_{name}",
        "name": name,
        "device_kinds": kinds,
        "cpu_slots": cpu_slots,
        "gpus": [{"index": index} for index in range(gpus)],
        "engines": engines,
        "private_roots": False,
        "described": 1,
    }
    return NodeView(**values | more)


def _room(node: NodeView, cpu: int | None = None, gpus: int | None = None) -> Room:
    """A room of which so much is free: all of it for None."""
    free_cpu = node.cpu_slots if cpu is None else cpu
    return Room(node, free_cpu, len(node.gpus) if gpus is None else gpus)


def _plan(*rooms: Room, away: Sequence[NodeView] = (), drained: Sequence[NodeView] = ()) -> Plan:
    closed = {node.id: NOT_HEARD for node in away} | {node.id: DRAINED for node in drained}
    registry = Registry()
    registry.update([*(room.node for room in rooms), *away, *drained])
    return Plan(rooms, closed, registry)


def _place(plan: Plan, need: str, job: str = "job", avoid: Sequence[str] = ()) -> Any:
    """(node's name, device, GPUs), or what the job waits for."""
    choice = plan.place(job, Need.parse(need), avoid)
    if choice is None:
        return plan.why_not(Need.parse(need))
    return choice.node.name, choice.device, choice.gpus


def test_a_need_is_its_text() -> None:
    spec = {"resources": {"device": "auto", "gpus": 4}, "recipe": {"engine": "te"}}
    need = need_of(spec)
    # Several GPUs are meant as such: they are not had by as many CPU slots.
    assert str(need) == "cuda:4:te"
    assert str(need.on("node_1")) == "cuda:4:te@node_1"
    spec = {"resources": {"device": "cpu", "gpus": 1, "cpu_ranks": 3}, "recipe": {"engine": "amp"}}
    assert str(need_of(spec)) == "cpu:3:amp"
    for text in ("auto:4:te", "cpu:1:emulated@node_1"):
        assert str(Need.parse(text)) == text


def test_auto_is_cuda_where_any_registered_node_has_it() -> None:
    cpu, gpu = _node("a"), _node("b", gpus=2)
    assert _place(_plan(_room(cpu)), "auto:1:emulated") == ("a", "cpu", 0)
    assert _place(_plan(_room(cpu), _room(gpu)), "auto:1:emulated") == ("b", "cuda", 1)
    full = _plan(_room(cpu), _room(gpu, gpus=0))
    assert _place(full, "auto:1:emulated") == "1 free GPU(s): b has 0 of 2 GPU(s) free"
    assert _place(full, "cpu:1:emulated") == ("a", "cpu", 0)
    # The only GPU node is away for the moment: the job waits for it all the same.
    assert "but b is not heard" in _place(_plan(_room(cpu), away=[gpu]), "auto:1:emulated")


def test_gpus_are_taken_from_the_fullest_node_that_fits() -> None:
    large, small = _node("large", gpus=8), _node("small", gpus=2)
    plan = _plan(_room(large), _room(small))
    assert [_place(plan, need)[0] for need in ("cuda:1:te", "cuda:4:te", "cuda:1:te")] == [
        "small",
        "large",
        "small",
    ]
    assert _place(plan, "cuda:4:te")[0] == "large"
    assert "large has 0 of 8" in _place(plan, "cuda:1:te")


def test_cpu_jobs_go_to_the_emptiest_node() -> None:
    plan = _plan(_room(_node("a", cpu_slots=2)), _room(_node("b", cpu_slots=2), cpu=1))
    assert [_place(plan, "cpu:1:emulated")[0] for _ in range(3)] == ["a", "a", "b"]


def test_each_rank_of_a_cpu_job_takes_a_slot() -> None:
    a, b = _node("a", cpu_slots=4), _node("b", cpu_slots=2)
    plan = _plan(_room(a), _room(b, cpu=1))
    assert plan.room_for(Need.parse("cpu:2:emulated"), 10) == 2
    choice = plan.place("job", Need.parse("cpu:3:emulated"))
    assert choice is not None
    assert (choice.node.name, choice.gpus, choice.cpu_slots) == ("a", 0, 3)
    waits = _place(plan, "cpu:2:emulated")
    assert waits == (
        "2 free CPU slots: a has 1 of 4 CPU slot(s) free; b has 1 of 2 CPU slot(s) free"
    )
    assert [_place(plan, "cpu:1:emulated")[0] for _ in range(2)] == ["b", "a"]
    spec = {"resources": {"device": "cpu", "gpus": 1, "cpu_ranks": 8}, "recipe": {"engine": "amp"}}
    many = [_node("a", cpu_slots=4, engines={"amp": OK}), _node("b", engines={"amp": OK})]
    assert never_fits(spec, many) == ["a has 4 CPU slot(s), not 8", "b has 1 CPU slot(s), not 8"]


def test_refusals_say_what_is_missing() -> None:
    node = _node("a", engines={"te": {"ok": False, "reasons": ["no CUDA device"]}})
    plan = _plan(_room(node))
    assert "no CUDA device" in _place(plan, "auto:1:te")
    assert "does not know the engine 'torchao'" in _place(plan, "auto:1:torchao")
    assert "offers no cuda device" in _place(plan, "cuda:1:te")
    spec = {"resources": {"device": "auto", "gpus": 1}, "recipe": {"engine": "emulated"}}
    assert never_fits(spec, []) is None
    assert never_fits(spec, [node]) is not None
    assert never_fits(spec, [_node("b")]) is None
    many = {"resources": {"device": "cuda", "gpus": 4}, "recipe": {"engine": "te"}}
    assert never_fits(many, [_node("g", gpus=2)]) == ["g has 2 GPU(s), not 4"]
    busy = _plan(_room(_node("a"), cpu=0))
    assert _place(busy, "cpu:1:emulated") == "a free CPU slot: a has all 1 CPU slot(s) in use"
    assert "none is registered" in _place(_plan(), "cpu:1:emulated")
    assert "none of the registered" in _place(_plan(away=[node]), "cpu:1:emulated")
    assert _place(_plan(drained=[node]), "cpu:1:emulated") == "an open node: a is drained"


def test_a_node_that_failed_comes_last_and_a_pin_binds() -> None:
    def plan() -> Plan:
        return _plan(_room(_node("a")), _room(_node("b")), away=[_node("c", private_roots=True)])

    assert _place(plan(), "cpu:1:emulated", avoid=["node_a"])[0] == "b"
    both = plan()
    assert [_place(both, "cpu:1:emulated", avoid=["node_a"])[0] for _ in range(2)] == ["b", "a"]
    assert _place(plan(), "cpu:1:emulated@node_b")[0] == "b"
    assert "lie on c, which is not heard" in _place(plan(), "cpu:1:emulated@node_c")
    # A node whose files all nodes reach by now binds nobody.
    assert str(plan().effective(Need.parse("cpu:1:emulated@node_b"))) == "cpu:1:emulated"
    assert plan().effective(Need.parse("cpu:1:emulated@node_c")).pinned == "node_c"


def test_a_held_node_is_left_alone_by_those_behind() -> None:
    large, small = _room(_node("large", gpus=4), gpus=3), _room(_node("small", gpus=2), gpus=1)
    plan = _plan(large, small)
    need = Need.parse("cuda:4:te")
    assert plan.place("big", need) is None
    assert plan.hold("big", need, None) == "node_large"
    assert _place(plan, "cuda:1:te", "next")[0] == "small"
    waits = _place(plan, "cuda:1:te", "last")
    assert "large has 3 of 4 GPU(s) free, kept for another job" in waits
    assert "large is kept free for the first such job" in plan.why_not(need)
    assert _place(plan, "cpu:1:emulated", "cpu")[0] in ("large", "small")


def test_the_node_held_before_is_kept() -> None:
    a, b = _room(_node("a", gpus=4), gpus=1), _room(_node("b", gpus=4), gpus=3)
    need = Need.parse("cuda:4:te")
    assert _plan(a, b).hold("job", need, "node_a") == "node_a"
    a.held_for = None
    assert _plan(a, b).hold("job", need, "node_gone") == "node_b"
