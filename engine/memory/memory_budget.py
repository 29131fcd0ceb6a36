"""The memory of one worker's device, and what of it each loaded model has been given.

A model is given its weights, and a pool for its KV cache: as much as was configured, else a share of
what is left. What one leaves when it is unloaded is there for the next.
"""

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.memory.footprint import Footprint
from engine.settings import EngineSettings
from kernels.cpu import library
from kernels.cpu.heap import release_freed_memory

MIB = 1024 * 1024
MIN_POOL_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class Grant:
    """What one model has."""

    weight_bytes: int
    pool_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.pool_bytes


class MemoryBudget:
    """Bytes by model. Changed by the keeper's thread alone; its sums may be read by any."""

    def __init__(self, total_bytes: int, settings: EngineSettings) -> None:
        self.total_bytes = total_bytes
        self._settings = settings
        self._grants: dict[str, Grant] = {}

    @property
    def free_bytes(self) -> int:
        """What nobody has been given."""
        return self.total_bytes - sum(grant.total_bytes for grant in list(self._grants.values()))

    def needed_bytes(self, footprint: Footprint) -> int:
        """What a model must be able to get: its weights, and room for one whole context."""
        pool = self._settings.kv_cache_mib * MIB
        if not footprint.kv_bytes_per_token:
            return footprint.weight_bytes
        return footprint.weight_bytes + (pool or max(MIN_POOL_BYTES, footprint.context_bytes))

    def grant(self, name: str, footprint: Footprint, *, is_cpu: bool) -> Grant:
        """Give a model its weights and a pool of what is left then; it may be a small one."""
        settings = self._settings
        left = max(MIN_POOL_BYTES, self.free_bytes - footprint.weight_bytes)
        pool = settings.kv_cache_mib * MIB if footprint.kv_bytes_per_token else 0
        if not pool and footprint.kv_bytes_per_token:
            share = settings.kv_cache_share if is_cpu else settings.gpu_kv_cache_share
            pool = max(int(share * left), min(left, footprint.context_bytes))
            if is_cpu:
                pool = min(pool, settings.kv_cache_mib_max * MIB)
        self._grants[name] = Grant(footprint.weight_bytes, min(pool, left))
        return self._grants[name]

    def granted(self, name: str) -> Grant:
        """What the model has."""
        return self._grants[name]

    def take_back(self, name: str) -> None:
        """The model is gone."""
        self._grants.pop(name, None)


def usable_bytes(settings: EngineSettings, device: torch.device) -> int:
    """The memory for models: as configured, else the configured share of what is free now."""
    if settings.memory_mib:
        return settings.memory_mib * MIB
    return int(free_bytes(device) * settings.memory_share)


def free_bytes(device: torch.device) -> int:
    """What could be allocated on the device without pushing anybody else out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def give_memory_back(device: torch.device) -> None:
    """After a model was loaded or dropped: what it needs no more leaves this process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if (cpu := library.active()) is not None:
        cpu.end_model()
    release_freed_memory()
