"""Scratch memory of decode attention, where programs leave parts of a sequence for one to merge.

Every layer of a step uses the same memory one after the other, and so may all steps of one stream.
A CUDA graph holds its addresses: whoever keeps the graph keeps the workspace, and captures the
largest step first, so that it never grows again.
"""

from __future__ import annotations

import torch


class AttentionWorkspace:
    """Grows to the largest launch that it has served."""

    def __init__(self, device: torch.device) -> None:
        self._arrivals = torch.zeros(0, dtype=torch.int32, device=device)
        self._partials = torch.empty(0, dtype=torch.float32, device=device)

    def arrivals(self, count: int) -> torch.Tensor:
        """At least `count` int32 counters, all zero: whoever counts up takes back down to zero."""
        if self._arrivals.numel() < count:
            self._arrivals = torch.zeros(count, dtype=torch.int32, device=self._arrivals.device)
        return self._arrivals

    def partials(self, count: int) -> torch.Tensor:
        """At least `count` fp32 elements of anything."""
        if self._partials.numel() < count:
            self._partials = torch.empty(count, dtype=torch.float32, device=self._partials.device)
        return self._partials
