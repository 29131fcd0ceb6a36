"""Rank 0's end of a shared model: to the engine a model like any other."""

import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import torch

from engine.errors import ModelRefused, RankLost
from engine.models.model import KVBlocks, ModelSpec
from engine.parallel.group import Meeting, RankGroup
from engine.parallel.sharded_decoder import ShardedDecoder, load_sharded
from engine.parallel.steps import Order, Step, send_step
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library
from kernels.kv_cache import PagedKVCache

END_TIMEOUT_S = 10.0
READY_POLL_S = 0.05


class Followers:
    """The processes of the other ranks; they end with the model, or with this process."""

    def __init__(
        self, meeting: Meeting, size: int, directory: Path, dtype: torch.dtype, device: str
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        command = [sys.executable, "-m", "engine.parallel.follower", "--path", str(directory)]
        command += ["--meeting", f"{meeting.host}:{meeting.port}", "--size", str(size)]
        command += ["--dtype", name, "--device", device, "--threads", str(torch.get_num_threads())]
        if (compiled := library.active()) is not None:
            command += ["--kernels", str(compiled.path)]
        self._processes = [
            subprocess.Popen([*command, "--rank", str(rank)])  # noqa: S603 - ourselves
            for rank in range(1, size)
        ]
        self._end = weakref.finalize(self, _end, self._processes)

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raises RankLost when one of them has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                raise RankLost(f"rank {rank} has ended with status {process.returncode}")


class LeadingModel:
    """A model of which this process has the first share. See `engine.models.model.Model`."""

    def __init__(self, decoder: ShardedDecoder, group: RankGroup, followers: Followers) -> None:
        self.followers = followers
        self._decoder = decoder
        self._group = group
        self._cache: weakref.ref[LeadingCache] | None = None

    @property
    def spec(self) -> ModelSpec:
        """Its numbers; on CPUs all ranks take the same machine's memory."""
        spec = self._decoder.spec
        num_caches = self._group.size if self.device.type == "cpu" else 1
        return replace(spec, bytes_per_block=spec.bytes_per_block * num_caches)

    @property
    def device(self) -> torch.device:
        """Where this rank's weights are."""
        return self._decoder.device

    def create_kv_cache(self, num_blocks: int) -> "LeadingCache":
        """A cache on every rank; the one before it is gone there."""
        self.followers.check()
        self._group.send_header([Order.CREATE_CACHE, num_blocks])
        cache = LeadingCache(self._decoder.create_kv_cache(num_blocks), self._group)
        self._cache = weakref.ref(cache)
        return cache

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """As the whole model does, on all ranks at once. Raises RankLost."""
        assert isinstance(kv_cache, LeadingCache)
        assert self._cache is not None
        assert self._cache() is kv_cache, "the other ranks have another cache by now"
        self.followers.check()
        send_step(self._group, Step(token_ids, metadata, rows))
        return self._decoder.forward(token_ids, kv_cache.local, metadata, rows)


class LeadingCache:
    """Rank 0's share of the KV cache, and the voice that moves the others'."""

    def __init__(self, local: PagedKVCache, group: RankGroup) -> None:
        self.local = local
        self._group = group

    def copy_block(self, source: int, destination: int) -> None:
        """See KVBlocks."""
        self._group.send_header([Order.COPY_BLOCK, source, destination])
        self.local.copy_block(source, destination)


def load_leading(
    directory: Path, dtype: torch.dtype, device: torch.device, size: int
) -> LeadingModel:
    """Start the other ranks and load this one's share. Raises ModelRefused, or RankLost."""
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ModelRefused(
            f"{size} ranks need {size} GPUs, and there are {torch.cuda.device_count()}",
            setting="tensor_parallel",
        )
    meeting, opening = RankGroup.lead(size, device)
    followers = Followers(meeting, size, directory, dtype, device.type)
    group = opening.group()
    decoder = load_sharded(directory, dtype, group)
    while not group.is_ready():
        followers.check()
        time.sleep(READY_POLL_S)
    return LeadingModel(decoder, group, followers)


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    """The model is gone."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
