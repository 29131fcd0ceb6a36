"""The paged KV cache: where keys and values of all sequences live, 64 tokens a page.

A page (the engine says block) holds 64 tokens of one layer for every KV head. A sequence owns a
list of page numbers, its block table; nothing is contiguous beyond a page and nothing ever moves,
so sequences with a common prefix can share pages. Source: PagedAttention, arXiv 2309.06180.

How the tokens lie inside a page is the layout's business alone: the C++ library wants keys paired
for its dot products, Triton and plain torch want rows. Both take the same number of bytes.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from kernels.cpu import library as cpu
from kernels.cpu.memory import lazy_zeros
from kernels.cpu.page_layout import PANELS

BLOCK_SIZE = 64


class PageLayout(Protocol):
    """How the [block_size, head_dim] elements of one head lie in a page."""

    @property
    def name(self) -> str:
        """What the layout is called, `plain` for rows."""

    def write_keys(
        self,
        pages: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        """Store keys [T, H, D] at `offsets` [T] of `blocks` [T]; pages [N, H, block_size, D]."""

    def write_values(
        self,
        pages: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """The same for values."""

    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys as stored [n, block_size, D], one head of a page each -> the same in token order."""

    def read_values(self, pages: torch.Tensor) -> torch.Tensor:
        """The same for values."""


class PlainLayout:
    """Rows: one token's elements side by side, tokens one after the other."""

    name = "plain"

    def write_keys(
        self,
        pages: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        """See PageLayout."""
        pages[blocks, :, offsets] = keys

    write_values = write_keys

    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """See PageLayout."""
        return pages

    read_values = read_keys


PLAIN = PlainLayout()


def _best_layout(device: torch.device, dtype: torch.dtype, head_dim: int) -> PageLayout:
    library = cpu.active()
    if device.type == "cpu" and library is not None and dtype in cpu.DTYPES:
        return PANELS if library.supports_head_dim(head_dim) else PLAIN
    return PLAIN


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zero once and for all: a masked value is multiplied by 0, which NaN would survive."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return lazy_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class PagedKVCache:
    """Keys and values of `num_layers` layers in `num_blocks` pages, zero-filled.

    keys[layer], values[layer]: [num_blocks, num_kv_heads, block_size, head_dim], in the order that
    `layout` says. The engine treats both as opaque; only kernels look inside.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        block_size: int = BLOCK_SIZE,
        layout: PageLayout | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_size = block_size
        self.layout = layout or _best_layout(self.device, dtype, head_dim)
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        storage = _zeros(shape, dtype, self.device)
        self.keys: tuple[torch.Tensor, ...] = tuple(storage[:, 0])
        self.values: tuple[torch.Tensor, ...] = tuple(storage[:, 1])

    @property
    def is_packed(self) -> bool:
        """Whether the pages lie as the C++ library wants them."""
        return self.layout is PANELS

    @classmethod
    def bytes_per_block(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int = BLOCK_SIZE,
    ) -> int:
        """Bytes of one page over all layers, keys and values; to size a cache beforehand."""
        return 2 * num_layers * num_kv_heads * block_size * head_dim * dtype.itemsize

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one page in every layer, as copy-on-write needs."""
        for pages in (*self.keys, *self.values):
            pages[destination].copy_(pages[source])

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys, values [T, H, D] at `slots` [T] = block * block_size + offset, all >= 0."""
        blocks = slots // self.block_size
        offsets = slots % self.block_size
        self.layout.write_keys(self.keys[layer], blocks, offsets, keys)
        self.layout.write_values(self.values[layer], blocks, offsets, values)

    def gather_blocks(
        self, layer: int, block_tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out whole pages: block_tables [B, P] -> keys, values [B, H, P * block_size, D]."""
        num_sequences, num_pages = block_tables.shape
        heads = torch.arange(self.num_kv_heads, device=block_tables.device)
        # One row a page and head, in the order of the result: four times faster than gathering
        # pages and transposing them.
        rows = block_tables.long()[:, None, :] * self.num_kv_heads + heads[:, None]  # [B, H, P]
        shape = (num_sequences, self.num_kv_heads, num_pages * self.block_size, self.head_dim)
        keys, values = (
            pages.view(-1, self.block_size, self.head_dim).index_select(0, rows.view(-1))
            for pages in (self.keys[layer], self.values[layer])
        )
        return (
            self.layout.read_keys(keys).view(shape),
            self.layout.read_values(values).view(shape),
        )

    def gather(
        self, layer: int, block_table: torch.Tensor, length: int, first_page: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out one sequence: keys, values [H, n, D] of the n tokens from `first_page` on.

        `length` counts from the context's start, so n = length - first_page * block_size.
        """
        last_page = -(-length // self.block_size)
        keys, values = self.gather_blocks(layer, block_table[None, first_page:last_page])
        num_tokens = length - first_page * self.block_size
        return keys[0, :, :num_tokens], values[0, :, :num_tokens]
