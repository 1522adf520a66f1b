"""What a job needs of a node, and the words for why a node cannot give it. No database."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

Spec = Mapping[str, Any]

_DEVICES = ("cpu", "cuda", "auto")
UNREADABLE = "has a registration that cannot be read"


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


@dataclass(frozen=True)
class Need:
    """What decides where a job can run: equal needs are placed, or not, together.

    Its text, `device:ranks:engine` with `@node` when only that node reaches the job's newest
    checkpoint, is stored with the job and groups the queue. Each rank takes a GPU, or a CPU slot.
    """

    device: str
    ranks: int
    engine: str
    pinned: str | None = None

    def __str__(self) -> str:
        pin = f"@{self.pinned}" if self.pinned is not None else ""
        return f"{self.device}:{self.ranks}:{self.engine}{pin}"

    @classmethod
    def parse(cls, text: str) -> "Need":
        """The need of this text. Raises ValueError for what no need reads as."""
        base, _, pinned = text.partition("@")
        device, ranks, engine = (*base.split(":", 2), "", "")[:3]
        if device not in _DEVICES or not ranks.isdecimal() or int(ranks) < 1 or not engine:
            raise ValueError(f"{text!r} is no need, as cpu:1:emulated is")
        return cls(device, int(ranks), engine, pinned or None)

    def on(self, node_id: str | None) -> "Need":
        """The same need, on this node only; on any for None."""
        return replace(self, pinned=node_id)


def need_of(spec: Spec) -> Need:
    """What a job of this resolved spec needs."""
    resources = spec["resources"]
    engine = str(spec["recipe"]["engine"])
    device, gpus = str(resources["device"]), int(resources["gpus"])
    if device == "cpu":
        return Need(device, int(resources.get("cpu_ranks", 1)), engine)
    # Several GPUs are no wish for as many CPU slots.
    return Need("cuda" if gpus > 1 else device, gpus, engine)


def device_for(need: Need, nodes: Iterable[NodeLike]) -> str:
    """The device kind to use: `auto` is CUDA where any of the nodes has it for this job."""
    if need.device != "auto":
        return need.device
    return "cuda" if any(refusal(need, node, "cuda") is None for node in nodes) else "cpu"


def refusal(need: Need, node: NodeLike, device: str) -> str | None:
    """Why this node can never run such a job on this device kind; None when it can."""
    try:
        return _refusal(need, node, device)
    except (AttributeError, TypeError):
        # Its row is damaged, and that must not refuse the job everywhere else.
        return f"{node.name} {UNREADABLE}"


def is_readable(node: NodeLike) -> bool:
    """Whether what a node said of itself is stored as registration takes it."""
    return (
        isinstance(node.gpus, list)
        and all(isinstance(gpu, dict) and type(gpu.get("index")) is int for gpu in node.gpus)
        and isinstance(node.engines, dict)
        and all(isinstance(state, dict) for state in node.engines.values())
    )


def _refusal(need: Need, node: NodeLike, device: str) -> str | None:
    if device not in node.device_kinds:
        return f"{node.name} offers no {device} device"
    if device == "cuda" and len(node.gpus) < need.ranks:
        return f"{node.name} has {len(node.gpus)} GPU(s), not {need.ranks}"
    if device == "cpu" and node.cpu_slots < 1:
        return f"{node.name} offers no CPU slot"
    if device == "cpu" and node.cpu_slots < need.ranks:
        return f"{node.name} has {node.cpu_slots} CPU slot(s), not {need.ranks}"
    state = node.engines.get(need.engine)
    if state is None:
        return f"{node.name} does not know the engine {need.engine!r}"
    if not state.get("ok"):
        why = "; ".join(state.get("reasons") or []) or "it gives no reason"
        return f"the engine {need.engine!r} is not available on {node.name}: {why}"
    return None


def never_fits(spec: Spec, nodes: Sequence[NodeLike]) -> list[str] | None:
    """Why no registered node could ever run the job; None when one could, or none is registered."""
    if not nodes:
        return None
    need = need_of(spec)
    device = device_for(need, nodes)
    why = [refusal(need, node, device) for node in nodes]
    return None if None in why else [reason for reason in why if reason is not None]
