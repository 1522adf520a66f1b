"""One tick's plan: which queued job goes to which node. No database.

Jobs come by priority, then age. A job of GPUs takes the fullest node that still fits, so that whole
nodes stay free for larger jobs; a job on CPUs the emptiest. Where one job of a need finds no room,
none behind it with the same need does. A node may be held for a job that waits for several GPUs:
jobs behind it then leave that node's GPUs alone, and fill all the others.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octrain_api.controller.placement import Need, refusal

# How many nodes a text names; how many needs the registry remembers.
_NAMED = 5
_MOST_NEEDS = 1000


@dataclass(frozen=True)
class NodeView:
    """A registered node, as it described itself; `described` differs when it does so anew."""

    id: str
    name: str
    device_kinds: list[str]
    cpu_slots: int
    gpus: list[dict[str, Any]]
    engines: dict[str, Any]
    private_roots: bool
    described: int
    # False when what is stored of it is damaged: then it can do nothing, as far as is known.
    readable: bool = True


@dataclass
class Room:
    """A node that may be given jobs now, and what of it is free."""

    node: NodeView
    cpu_free: int
    gpus_free: int
    held_for: str | None = None


@dataclass(frozen=True)
class Choice:
    """Where a job goes. The GPUs themselves are chosen when the node is locked."""

    job_id: str
    need: str
    node: NodeView
    device: str
    gpus: int
    cpu_slots: int


class Registry:
    """Every registered node, and which of them can run which need: kept from tick to tick."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeView] = {}
        self._capable: dict[tuple[str, int, str], list[str]] = {}

    def update(self, nodes: Collection[NodeView]) -> None:
        """Take in what nodes say of themselves anew."""
        if nodes:
            self.nodes.update((node.id, node) for node in nodes)
            self._capable.clear()

    def capable(self, need: Need, device: str) -> list[str]:
        """The nodes that can run such a job on this device kind, by id; a pin aside."""
        key = (need.engine, need.ranks, device)
        found = self._capable.get(key)
        if found is None:
            if len(self._capable) > _MOST_NEEDS:
                self._capable.clear()
            found = self._capable[key] = [
                node.id for node in self.nodes.values() if refusal(need, node, device) is None
            ]
        return found


@dataclass
class _Pool:
    """The rooms that can run one need, the best first; entries may be out of date."""

    device: str
    heap: list[tuple[int, str, str]] = field(default_factory=list)


class Plan:
    """The rooms of one tick. `closed` says of every other registered node why it gets no jobs."""

    def __init__(
        self, rooms: Sequence[Room], closed: Mapping[str, str], registry: Registry
    ) -> None:
        self._rooms = {room.node.id: room for room in rooms}
        self._closed = closed
        self._registry = registry
        self._pools: dict[Need, _Pool] = {}
        self._held: dict[Need, str] = {}

    def effective(self, need: Need) -> Need:
        """The need without a pin to a node whose files all nodes reach by now."""
        if need.pinned is None:
            return need
        node = self._registry.nodes.get(need.pinned)
        return need.on(None) if node is not None and not node.private_roots else need

    def device(self, need: Need) -> str:
        """The device kind on which such jobs run; all registered nodes decide what `auto` is."""
        return self._pool(need).device

    def room_for(self, need: Need, most: int) -> int:
        """How many jobs of this need might be placed, as far as `most`."""
        pool = self._pool(need)
        count = 0
        for _, _, node_id in pool.heap:
            room = self._rooms[node_id]
            count += (room.gpus_free if pool.device == "cuda" else room.cpu_free) // need.ranks
            if count >= most:
                return most
        return count

    def place(self, job_id: str, need: Need, avoid: Collection[str] = ()) -> Choice | None:
        """Take the best room; the nodes of `avoid` only when no other has any."""
        pool = self._pool(need)
        avoided: list[tuple[int, str, str]] = []
        found = None
        while pool.heap and found is None:
            entry = heapq.heappop(pool.heap)
            room = self._rooms[entry[2]]
            if entry[0] != _rank(pool.device, room):
                self._push(need, pool, room)
            elif pool.device == "cuda" and room.held_for not in (None, job_id):
                # Whoever comes later in this tick may not have it either.
                continue
            elif room.node.id in avoid:
                avoided.append(entry)
            else:
                found = entry
        if found is None and avoided:
            found = avoided.pop(0)
        for entry in avoided:
            heapq.heappush(pool.heap, entry)
        if found is None:
            return None
        room = self._rooms[found[2]]
        on_gpus = pool.device == "cuda"
        gpus, slots = (need.ranks, 0) if on_gpus else (0, need.ranks)
        room.gpus_free -= gpus
        room.cpu_free -= slots
        self._push(need, pool, room)
        return Choice(job_id, str(need), room.node, pool.device, gpus, slots)

    def capable(self, need: Need) -> list[Room]:
        """The open rooms whose nodes can run such a job, free or not."""
        ids = self._registry.capable(need, self.device(need))
        return [
            self._rooms[node_id]
            for node_id in ids
            if node_id in self._rooms and need.pinned in (None, node_id)
        ]

    def hold(self, job_id: str, need: Need, preferred: str | None) -> str | None:
        """Hold a node's GPUs for a job that found no room; the node's id.

        `preferred` is the node held before, which is kept while it can serve; else the one with
        the most free GPUs.
        """
        rooms = [room for room in self.capable(need) if room.held_for is None]
        if not rooms:
            return None
        room = next(
            (room for room in rooms if room.node.id == preferred),
            min(rooms, key=lambda room: (-room.gpus_free, room.node.name)),
        )
        room.held_for = job_id
        self._held[need] = room.node.name
        return room.node.id

    def why_not(self, need: Need) -> str:
        """What the jobs of a need that found no room wait for."""
        nodes = self._registry.nodes
        if not nodes:
            return "a node: none is registered"
        if need.pinned is not None and need.pinned in self._closed:
            name, why = nodes[need.pinned].name, self._closed[need.pinned]
            return f"its node: the job's checkpoints lie on {name}, which {why}"
        if not self._rooms:
            if all(why == NOT_HEARD for why in self._closed.values()):
                return "a live node: none of the registered ones is heard"
            return "an open node: " + self._first_closed(self._closed)
        device = self.device(need)
        capable = self.capable(need)
        if capable:
            what = f"{need.ranks} free GPU(s)"
            if device == "cpu":
                what = "a free CPU slot" if need.ranks == 1 else f"{need.ranks} free CPU slots"
            busy = "; ".join(self._busy(need, room, device) for room in capable[:_NAMED])
            held = self._held.get(need)
            kept = f"; {held} is kept free for the first such job" if held is not None else ""
            return f"{what}: {busy}{kept}"
        rooms = [room.node for room in self._rooms.values() if need.pinned in (None, room.node.id)]
        why = "; ".join(filter(None, (refusal(need, node, device) for node in rooms[:_NAMED])))
        # Nodes that are away or closed may be the ones that could.
        could = self._first_closed(self._registry.capable(need, device), 1)
        return f"a capable node: {why}" + (f"; but {could}" if could else "")

    def _busy(self, need: Need, room: Room, device: str) -> str:
        node = room.node
        if device == "cpu":
            if room.cpu_free <= 0:
                return f"{node.name} has all {node.cpu_slots} CPU slot(s) in use"
            return f"{node.name} has {room.cpu_free} of {node.cpu_slots} CPU slot(s) free"
        free = f"{node.name} has {room.gpus_free} of {len(node.gpus)} GPU(s) free"
        return f"{free}, kept for another job" if room.gpus_free >= need.ranks else free

    def _first_closed(self, node_ids: Collection[str], count: int = _NAMED) -> str:
        closed = [node_id for node_id in node_ids if node_id in self._closed][:count]
        nodes = self._registry.nodes
        return "; ".join(f"{nodes[each].name} {self._closed[each]}" for each in closed)

    def _pool(self, need: Need) -> _Pool:
        pool = self._pools.get(need)
        if pool is None:
            device = need.device
            if device == "auto":
                device = "cuda" if self._registry.capable(need, "cuda") else "cpu"
            ids = self._registry.capable(need, device)
            rooms = [
                room
                for node_id in ids
                if (room := self._rooms.get(node_id)) is not None
                and _fits(need, device, room)
                and need.pinned in (None, node_id)
            ]
            heap = [(_rank(device, room), room.node.name, room.node.id) for room in rooms]
            heapq.heapify(heap)
            pool = self._pools[need] = _Pool(device, heap)
        return pool

    @staticmethod
    def _push(need: Need, pool: _Pool, room: Room) -> None:
        if _fits(need, pool.device, room):
            entry = (_rank(pool.device, room), room.node.name, room.node.id)
            heapq.heappush(pool.heap, entry)


def _fits(need: Need, device: str, room: Room) -> bool:
    return (room.gpus_free if device == "cuda" else room.cpu_free) >= need.ranks


def _rank(device: str, room: Room) -> int:
    """The least is the best: the fullest node for GPUs, the emptiest for CPU slots."""
    return room.gpus_free if device == "cuda" else room.node.cpu_slots - room.cpu_free


NOT_HEARD = "is not heard"
DRAINED = "is drained"
SET_ASIDE = "is set aside for repeated faults until an administrator releases it"
