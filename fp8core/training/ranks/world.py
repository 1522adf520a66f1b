"""The ranks of a run, as one of them sees them: what they add up, agree on and wait for.

Small numbers go between the hosts (gloo), so that nothing waits for a device; gradients, the loss
and amaxes go where they lie (NCCL between GPUs). Every method is called by all ranks, in the same
order. A job of one process has the world ``SOLO``, in which nothing is sent.

Where one rank works and the others have nothing to do (it writes a checkpoint, loads a tokenizer)
they wait at the store that torchrun keeps, for as long as it takes: the launcher ends them should
that rank die. Exchanges proper end after ``resources.rank_timeout_seconds``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8core.errors import RankLost, TrainingError

__all__ = ["SOLO", "World", "join"]

_POLL_SECONDS = 0.02
_GONE = "gone"


class World:
    """``rank`` of ``size``; a world of one needs nothing of torch.distributed."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._turn = 0
        self._left = False

    @property
    def main(self) -> bool:
        """Whether this rank writes and reports."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    # Between hosts

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over the ranks; whole numbers up to 2**53 stay exact."""
        return self._on_hosts(list(numbers), dist.ReduceOp.SUM)

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        return self._on_hosts([number], dist.ReduceOp.MAX)[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: one answer for all, at the same place."""
        return self.largest(float(flag)) > 0 if self.several else flag

    def union(self, flags: Tensor) -> Tensor:
        """``flags`` (uint8, on the host), set where any rank has set them."""
        if self.several:
            with self._exchange():
                dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in their order."""
        if not self.several:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        longest = int(self.largest(data.numel()))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: data.numel()] = data
        found = [torch.empty_like(padded) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(found, padded)
        return [json.loads(bytes(each.tolist())) for each in found]

    def same(self, what: str, value: str) -> None:
        """Raises ``TrainingError`` on every rank unless ``value`` is the same on all."""
        found = self.gather(value)
        if len(set(found)) > 1:
            others = [rank for rank, other in enumerate(found) if other != found[0]]
            raise TrainingError(
                f"the ranks no longer hold the same {what}: rank {others[0]} differs from rank 0"
            )

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes (JSON values), for all; the others wait as long as it takes."""
        if not self.several:
            return make()
        self._turn += 1
        key = f"turn-{self._turn}"
        store = _store()
        if self.main:
            value = make()
            with self._exchange():
                store.set(key, json.dumps(value))
            return value
        while True:
            with self._exchange():
                if store.check([key]):
                    return json.loads(store.get(key))
                if store.check([_GONE]):
                    raise RankLost(f"{store.get(_GONE).decode()} while others waited for rank 0")
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """This rank ends before its time: whoever waits for rank 0 need wait no longer."""
        self._left = True
        if self.several and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                _store().set(_GONE, f"rank {self.rank} ended")

    # Where the tensors lie

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """All ranks, for an engine that reduces amaxes by itself; None for one rank."""
        return dist.group.WORLD if self.several else None

    def add_up(self, tensor: Tensor, *, later: bool = False) -> dist.Work | None:
        """Sums ``tensor`` over the ranks in place, on its device.

        ``later``: returns at once; ``finish`` waits.
        """
        if not self.several:
            return None
        with self._exchange():
            return dist.all_reduce(tensor, async_op=later)

    def finish(self, work: dist.Work | None) -> None:
        """Waits for an ``add_up`` (on CUDA, the stream does, not the host)."""
        if work is not None:
            with self._exchange():
                work.wait()

    def maximum(self, tensor: Tensor) -> None:
        """The largest of the ranks' values, element by element, in place."""
        if self.several and tensor.numel():
            with self._exchange():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def _on_hosts(self, numbers: list[float], operation: Any) -> list[float]:
        if not self.several:
            return numbers
        values = torch.tensor(numbers, dtype=torch.float64)
        with self._exchange():
            dist.all_reduce(values, op=operation)
        found: list[float] = values.tolist()
        return found

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            text = " ".join(str(error).split())[:300]
            raise RankLost(f"rank {self.rank} lost the others in an exchange: {text}") from error


SOLO = World()


@contextlib.contextmanager
def join(rank: int, size: int, device: torch.device, timeout_seconds: int) -> Iterator[World]:
    """The world of this rank, which torchrun's environment leads to, until the end of the block.

    Raises ``RankLost`` where the others do not come.
    """
    world = World(rank, size)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    # Ranks share one machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A process whose exchange timed out may stay until the heartbeat of its NCCL watchdog is
    # missed, 480 seconds unless told. PyTorch's own `test_timeout_dumps_on_stuck_ranks`
    # (test/distributed/test_c10d_nccl.py) sets one second for that reason.
    beat = min(480, max(30, timeout_seconds))
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(beat))
    with world._exchange():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if on_gpu else None,
        )
    try:
        yield world
    except BaseException:
        # A communicator that others have left cannot be taken down in order; the process ends.
        world.leave()
        raise
    if not world._left:
        dist.destroy_process_group()


def _store() -> Any:
    """The store of the default group, which the agent of torchrun serves."""
    return dist.distributed_c10d._get_default_store()
