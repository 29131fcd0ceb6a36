"""What a row's request asks of sampling; see `kernels.sampling` for what it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How each of B rows is sampled. All tensors are [B] on the logits' device.

    temperature: fp32, 0 = greedy. top_p: fp32 in (0, 1], 1 = off. top_k: int64, 0 = off.
    min_p: fp32 in [0, 1), 0 = off. seeds: int64. positions: int64, the index of the token drawn.
    is_all_greedy: a promise of the caller that saves the rest of the work.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    is_all_greedy: bool = False

    @classmethod
    def build(
        cls,
        *,
        temperature: Sequence[float],
        top_p: Sequence[float],
        top_k: Sequence[int],
        min_p: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """A batch from lists; seeds of any size are reduced to 64 bits."""
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            seeds=torch.tensor([signed64(s) for s in seeds], dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            is_all_greedy=all(t == 0 for t in temperature),
        )

    def rows(self, index: torch.Tensor) -> SamplingBatch:
        """The batch of these rows alone."""
        return SamplingBatch(
            temperature=self.temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            min_p=self.min_p[index],
            seeds=self.seeds[index],
            positions=self.positions[index],
        )


def signed64(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
