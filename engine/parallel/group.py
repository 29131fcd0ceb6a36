"""The processes that compute one model together, and what they say to each other.

Rank 0 is the worker; it alone plans and samples. A group belongs to one model: there is no group of the
process, so that several models, each with its own, may be loaded. Small numbers go by gloo, from host
to host; tensors go by NCCL between GPUs, by gloo between CPUs.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from engine.errors import RankLost

STEP_TIMEOUT = timedelta(seconds=60)
"""A rank that does not answer for so long within a step is lost."""
JOIN_TIMEOUT = timedelta(seconds=120)
"""How long the ranks of a group wait for each other to start."""
IDLE_TIMEOUT = timedelta(days=365)
"""How long a follower waits for the next step."""
HEADER_LEN = 8


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one group find each other."""

    host: str
    port: int


class RankGroup:
    """One rank's end of a group. Every operation raises RankLost when another rank is gone."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._store = store
        idle = STEP_TIMEOUT if rank == 0 else IDLE_TIMEOUT
        self._headers: Any = _gloo(PrefixStore("headers", store), rank, size, idle)
        tensors = PrefixStore("tensors", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            self._tensors: Any = dist.ProcessGroupNCCL(tensors, rank, size, options)
        else:
            self._tensors = _gloo(tensors, rank, size, STEP_TIMEOUT)

    @classmethod
    def lead(cls, size: int, device: torch.device) -> "tuple[Meeting, Opening]":
        """Open a meeting on this machine; the group is there once all ranks have come."""
        store = TCPStore("127.0.0.1", 0, size, True, JOIN_TIMEOUT, wait_for_workers=False)
        return Meeting("127.0.0.1", store.port), Opening(store, size, device)

    @classmethod
    def join(cls, meeting: Meeting, rank: int, size: int, device: torch.device) -> "RankGroup":
        """Come to a meeting that rank 0 has opened."""
        store = TCPStore(meeting.host, meeting.port, size, False, JOIN_TIMEOUT)
        return cls(store, rank, size, device)

    def tell_ready(self) -> None:
        """Another rank: its share is loaded."""
        self._store.set(f"ready {self.rank}", "")

    def is_ready(self) -> bool:
        """Whether all other ranks have said so."""
        return bool(self._store.check([f"ready {rank}" for rank in range(1, self.size)]))

    def send_header(self, numbers: list[int]) -> None:
        """Rank 0: tell all others what comes next."""
        header = torch.zeros(HEADER_LEN, dtype=torch.int64)
        header[: len(numbers)] = torch.tensor(numbers)
        self._wait(self._headers, "broadcast", [header])

    def receive_header(self) -> list[int]:
        """What rank 0 has told; waits for it for as long as it takes."""
        header = torch.zeros(HEADER_LEN, dtype=torch.int64)
        self._wait(self._headers, "broadcast", [header])
        return header.tolist()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor in everybody's; returned for convenience."""
        self._wait(self._tensors, "broadcast", [tensor])
        return tensor

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors in everybody's; returned for convenience."""
        self._wait(self._tensors, "allreduce", [tensor])
        return tensor

    def collect(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors [R, n], one beside the other: [R, size * n]."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._wait(self._tensors, "allgather", [parts], [tensor])
        return torch.cat(parts, dim=1)

    def _wait(self, group: Any, operation: str, *arguments: object) -> None:
        try:
            getattr(group, operation)(*arguments).wait()
        except RuntimeError as fault:
            raise RankLost(f"rank {self.rank} of {self.size} has lost another: {fault}") from fault


class Opening:
    """A meeting to which not everybody has come yet."""

    def __init__(self, store: Store, size: int, device: torch.device) -> None:
        self._store = store
        self._size = size
        self._device = device

    def group(self) -> RankGroup:
        """Wait for the others."""
        return RankGroup(self._store, 0, self._size, self._device)


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    return ProcessGroupGloo(store, rank, size, timeout)
