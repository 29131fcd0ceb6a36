"""How the C++ library lays keys and values into a page; `kv_pages.h` describes the same."""

from __future__ import annotations

import torch


def _depth(pages: torch.Tensor) -> int:
    """Neighbours in the summed dimension: pairs of bf16, single floats."""
    return 4 // pages.element_size()


class PanelLayout:
    """keys [D / depth][64][depth], values [64 / depth][D][depth] for each head of a page."""

    name = "panels"

    def write_keys(
        self,
        pages: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        """See `kernels.kv_cache.PageLayout`."""
        depth = _depth(pages)
        num_blocks, num_heads, size, head_dim = pages.shape
        panels = pages.view(num_blocks, num_heads, head_dim // depth, size, depth)
        panels[blocks, :, :, offsets] = keys.reshape(
            len(keys), num_heads, head_dim // depth, depth
        ).to(pages.dtype)

    def write_values(
        self,
        pages: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """See `kernels.kv_cache.PageLayout`."""
        depth = _depth(pages)
        num_blocks, num_heads, size, head_dim = pages.shape
        panels = pages.view(num_blocks, num_heads, size // depth, head_dim, depth)
        panels[blocks, :, offsets // depth, :, offsets % depth] = values.to(pages.dtype)

    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """See `kernels.kv_cache.PageLayout`."""
        depth = _depth(pages)
        count, size, head_dim = pages.shape
        panels = pages.reshape(count, head_dim // depth, size, depth)
        return panels.permute(0, 2, 1, 3).reshape(count, size, head_dim).contiguous()

    def read_values(self, pages: torch.Tensor) -> torch.Tensor:
        """See `kernels.kv_cache.PageLayout`."""
        depth = _depth(pages)
        count, size, head_dim = pages.shape
        panels = pages.reshape(count, size // depth, head_dim, depth)
        return panels.permute(0, 1, 3, 2).reshape(count, size, head_dim).contiguous()


PANELS = PanelLayout()
