"""Which node can run a job, which has room for it now, and the words for why not. No database."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Spec = Mapping[str, Any]


class NodeLike(Protocol):
    """What placement reads of a node."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def device_kinds(self) -> list[str]: ...
    @property
    def cpu_slots(self) -> int: ...
    @property
    def gpus(self) -> list[dict[str, Any]]: ...
    @property
    def engines(self) -> dict[str, Any]: ...


@dataclass
class Candidate:
    """A node and what of it is taken."""

    node: NodeLike
    cpu_used: int = 0
    gpus_used: set[int] = field(default_factory=set)

    @property
    def free_gpus(self) -> list[int]:
        """Indices of the GPUs that no attempt holds."""
        indices = (int(gpu["index"]) for gpu in self.node.gpus)
        return sorted(index for index in indices if index not in self.gpus_used)

    def take(self, placement: "Placement") -> None:
        """Note that a placement has taken its slots."""
        if placement.device == "cpu":
            self.cpu_used += 1
        self.gpus_used.update(placement.gpu_indices)


@dataclass(frozen=True)
class Placement:
    """Where a job goes."""

    node_id: str
    device: str
    gpu_indices: list[int]


def devices_for(spec: Spec, nodes: Iterable[NodeLike]) -> list[str]:
    """The device kinds to be tried: `auto` is CUDA where any of the nodes has it for this job."""
    wanted = str(spec["resources"]["device"])
    if wanted != "auto":
        return [wanted]
    if any(refusal(spec, node, "cuda") is None for node in nodes):
        return ["cuda"]
    return ["cpu"]


def refusal(spec: Spec, node: NodeLike, device: str) -> str | None:
    """Why this node can never run the job on this device kind; None when it can."""
    if device not in node.device_kinds:
        return f"{node.name} offers no {device} device"
    if device == "cuda" and len(node.gpus) < int(spec["resources"]["gpus"]):
        return f"{node.name} has {len(node.gpus)} GPU(s), not {spec['resources']['gpus']}"
    if device == "cpu" and node.cpu_slots < 1:
        return f"{node.name} offers no CPU slot"
    engine = str(spec["recipe"]["engine"])
    state = node.engines.get(engine)
    if state is None:
        return f"{node.name} does not know the engine {engine!r}"
    if not state.get("ok"):
        why = "; ".join(state.get("reasons") or []) or "it gives no reason"
        return f"the engine {engine!r} is not available on {node.name}: {why}"
    return None


def never_fits(spec: Spec, nodes: Sequence[NodeLike]) -> list[str] | None:
    """Why no registered node could ever run the job; None when one could, or none is registered."""
    if not nodes:
        return None
    why = []
    for node in nodes:
        for device in devices_for(spec, nodes):
            reason = refusal(spec, node, device)
            if reason is None:
                return None
            why.append(reason)
    return why


def choose(
    spec: Spec,
    candidates: Sequence[Candidate],
    *,
    registered: Sequence[NodeLike],
    avoid: Sequence[str] = (),
    pinned: str | None = None,
) -> Placement | str:
    """A placement on one of the live `candidates`, or what the job waits for.

    `registered` are all known nodes, live or not: they decide what `auto` means. `avoid` are taken
    only when no other node has room; `pinned` is the only node that reaches the job's checkpoints.
    """
    if not registered:
        return "a node: none is registered"
    if not candidates:
        return "a live node: none of the registered ones is heard"
    usable = [c for c in candidates if pinned is None or c.node.id == pinned]
    if not usable:
        return "its node: the job's checkpoints lie on a node that is not heard"
    devices = devices_for(spec, registered)
    need = int(spec["resources"]["gpus"])
    refusals: list[str] = []
    busy: list[str] = []
    found: list[tuple[tuple[bool, int, str], Placement]] = []
    for candidate in usable:
        node = candidate.node
        for device in devices:
            reason = refusal(spec, node, device)
            if reason is not None:
                refusals.append(reason)
            elif device == "cpu":
                if candidate.cpu_used < node.cpu_slots:
                    rank = (node.id in avoid, candidate.cpu_used, node.name)
                    found.append((rank, Placement(node.id, device, [])))
                else:
                    busy.append(f"{node.name} has all {node.cpu_slots} CPU slot(s) in use")
            else:
                free = candidate.free_gpus
                if len(free) >= need:
                    # The fullest node that still fits: whole nodes stay free for larger jobs.
                    rank = (node.id in avoid, len(free), node.name)
                    found.append((rank, Placement(node.id, device, free[:need])))
                else:
                    busy.append(f"{node.name} has {len(free)} of {len(node.gpus)} GPU(s) free")
    if found:
        return min(found, key=lambda item: item[0])[1]
    if busy:
        what = "a free CPU slot" if devices == ["cpu"] else f"{need} free GPU(s)"
        return f"{what}: " + "; ".join(busy[:5])
    return "a capable node: " + "; ".join(refusals[:5])
