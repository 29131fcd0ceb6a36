"""A paged KV cache for models whose layers differ in their heads or in their size."""

from dataclasses import dataclass

import torch

from kernels.kv_cache import PagedKVCache


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    head_dim: int
    """The larger of a key and a value; the smaller is padded."""
    dtype: torch.dtype


class LayeredKVCache:
    """Layers of one shape share a `PagedKVCache`; all of them share the numbers of the blocks."""

    def __init__(self, shapes: list[LayerShape], num_blocks: int, device: torch.device) -> None:
        self._caches = {
            shape: PagedKVCache(
                shapes.count(shape),
                num_blocks,
                shape.num_kv_heads,
                shape.head_dim,
                shape.dtype,
                device,
            )
            for shape in dict.fromkeys(shapes)
        }
        self._places = [
            (self._caches[shape], shapes[:index].count(shape)) for index, shape in enumerate(shapes)
        ]

    @staticmethod
    def bytes_per_block(shapes: list[LayerShape]) -> int:
        """Bytes of one block over all layers."""
        return sum(
            PagedKVCache.bytes_per_block(1, shape.num_kv_heads, shape.head_dim, shape.dtype)
            for shape in shapes
        )

    def place(self, layer: int) -> tuple[PagedKVCache, int]:
        """The cache that holds this layer, and the layer's index in it."""
        return self._places[layer]

    def copy_block(self, source: int, destination: int) -> None:
        """Copy one block in every layer."""
        for cache in self._caches.values():
            cache.copy_block(source, destination)
