"""The paged KV cache: where keys and values of all sequences live, 64 tokens a page.

A page (the engine says block) holds 64 tokens of one layer for every KV head. A sequence owns a
list of page numbers, its block table; nothing is contiguous beyond a page and nothing ever moves,
so sequences with a common prefix can share pages. Source: PagedAttention, arXiv 2309.06180.

A cache of 8-bit floats (e4m3) halves what decode reads: an element stands for itself times the
scale of its layer and head. What is beyond the largest of them, 448 scales, is stored as that.

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
FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0


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


def _rows(pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copies of single heads of pages: rows [...] of page * H + head -> [n, block_size, D]."""
    heads = pages.view(-1, *pages.shape[2:])
    if pages.dtype == FLOAT8:  # torch does not select among them on every device
        return heads.view(torch.uint8).index_select(0, rows.view(-1)).view(FLOAT8)
    return heads.index_select(0, rows.view(-1))


def _to_float8(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x: [T, H, D] -> the bits of the same in units of its head's scale [H]: uint8."""
    limited = (x.float() / scales[:, None]).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return limited.to(FLOAT8).view(torch.uint8)


def _from_float8(x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x: [n, block_size, D] of the heads `rows` [..., H, P] -> fp32."""
    factors = scales[:, None].expand(rows.shape).reshape(-1)
    return x.float() * factors[:, None, None]


class PagedKVCache:
    """Keys and values of `num_layers` layers in `num_blocks` pages, zero-filled.

    keys[layer]: [num_blocks, num_kv_heads, block_size, head_dim], values[layer] with value_dim in
    its place, both in the order that `layout` says. The engine treats them as opaque; only kernels
    look inside. key_scales[layer], value_scales[layer]: [num_kv_heads] fp32, 1 until somebody
    writes better ones; only a cache of float8_e4m3fn has use for them.
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
        value_dim: int | None = None,
    ) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.block_size = block_size
        self.value_dim = head_dim if value_dim is None else value_dim
        if layout is None and self.value_dim != head_dim:
            layout = PLAIN
        self.layout = layout or _best_layout(self.device, dtype, head_dim)
        shape = (num_layers, num_blocks, num_kv_heads, block_size)
        self.keys: tuple[torch.Tensor, ...] = tuple(_zeros((*shape, head_dim), dtype, self.device))
        self.values: tuple[torch.Tensor, ...] = tuple(
            _zeros((*shape, self.value_dim), dtype, self.device)
        )
        scales = torch.ones((2, num_layers, num_kv_heads), device=self.device)
        self.key_scales, self.value_scales = scales[0], scales[1]

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
        value_dim: int | None = None,
    ) -> int:
        """Bytes of one page over all layers, keys and values; to size a cache beforehand."""
        width = head_dim + (head_dim if value_dim is None else value_dim)
        return num_layers * num_kv_heads * block_size * width * dtype.itemsize

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
        key_pages, value_pages = self.keys[layer], self.values[layer]
        if self.dtype == FLOAT8:
            keys = _to_float8(keys, self.key_scales[layer])
            values = _to_float8(values, self.value_scales[layer])
            key_pages, value_pages = key_pages.view(torch.uint8), value_pages.view(torch.uint8)
        self.layout.write_keys(key_pages, blocks, offsets, keys)
        self.layout.write_values(value_pages, blocks, offsets, values)

    def gather_blocks(
        self, layer: int, block_tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out whole pages: block_tables [B, P] -> keys, values [B, H, P * block_size, D].

        Those of a cache of 8-bit floats come out in fp32.
        """
        num_sequences, num_pages = block_tables.shape
        heads = torch.arange(self.num_kv_heads, device=block_tables.device)
        # One row a page and head, in the order of the result: four times faster than gathering
        # pages and transposing them.
        rows = block_tables.long()[:, None, :] * self.num_kv_heads + heads[:, None]  # [B, H, P]
        keys = self.layout.read_keys(_rows(self.keys[layer], rows))
        values = self.layout.read_values(_rows(self.values[layer], rows))
        if self.dtype == FLOAT8:
            keys = _from_float8(keys, rows, self.key_scales[layer])
            values = _from_float8(values, rows, self.value_scales[layer])
        shape = (num_sequences, self.num_kv_heads, num_pages * self.block_size)
        return keys.view(*shape, self.head_dim), values.view(*shape, self.value_dim)

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
