"""Measures tiles of prefill attention on this GPU and keeps the best of each shape.

    python -m kernels.benchmarks.tune [--out var/tuning]

Without a GPU it can only write down what the rules say: `--rules H100` is how the tables that come with
the product were made, and their `origin` says so.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.benchmarks.limits import median_seconds
from kernels.kv_cache import BLOCK_SIZE, PagedKVCache
from kernels.mixed_attention import mixed_with_triton
from kernels.paged_prefill_attention import rule_of_tile, tile_rows
from kernels.triton_support import major_capability, next_power_of_2
from kernels.tuning import (
    MEASURED,
    RULES,
    SHIPPED,
    Tile,
    TileShape,
    TuningTable,
    shape_of,
    table_name,
)

HEADS = ((32, 8, 128), (64, 8, 128), (40, 8, 128), (9, 3, 64), (16, 16, 256))
"""Query heads, KV heads, head size: Llama 3 8B, Qwen3 32B, Qwen3 14B, SmolLM2, Gemma 7B."""
QUERY_LENS = (16, 64, 256, 1024, 4096)
DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CONTEXT = 8192
CAPABILITIES = {"A100": 8, "H100": 9, "H200": 9}
"""Major compute capability by the name that a GPU's own name contains."""


def shapes() -> Iterator[tuple[TileShape, tuple[int, int, int]]]:
    """What is tuned, with its heads."""
    for dtype in DTYPE_NAMES.values():
        for heads in HEADS:
            for query_len in QUERY_LENS:
                yield shape_of(dtype, heads[2], heads[0] // heads[1], query_len), heads


def by_rules(gpu: str) -> TuningTable:
    """What the rules of the kernel files choose for a GPU of this name."""
    tiles = {
        shape.key: rule_of_tile(
            DTYPE_NAMES[shape.dtype],
            shape.head_dim,
            shape.group,
            shape.query_len,
            CAPABILITIES[gpu],
        )
        for shape, _ in shapes()
    }
    return TuningTable(gpu, "", RULES, tiles)


def measured(device: torch.device) -> TuningTable:
    """The fastest tile of each shape on this GPU."""
    tiles: dict[str, Tile] = {}
    for shape, heads in shapes():
        if shape.key in tiles:
            continue
        times = {tile: _seconds(shape, heads, tile, device) for tile in _candidates(shape, device)}
        best = min(times, key=times.__getitem__)
        tiles[shape.key] = best  # all infinite: the first, which the rules might as well take
        print(f"{shape.key:40} {best} {1e6 * times[best]:9.1f} us")
    return TuningTable(torch.cuda.get_device_name(device), version("triton"), MEASURED, tiles)


def _candidates(shape: TileShape, device: torch.device) -> Iterator[Tile]:
    dtype = DTYPE_NAMES[shape.dtype]
    most = tile_rows(dtype, shape.head_dim, major_capability(device))
    least = max(16, next_power_of_2(shape.group))
    rows = least
    while rows <= max(most, least):
        for num_warps in (4, 8):
            for num_stages in (2, 3):
                yield Tile(rows, num_warps, num_stages)
        rows *= 2


def _seconds(
    shape: TileShape, heads: tuple[int, int, int], tile: Tile, device: torch.device
) -> float:
    num_heads, num_kv_heads, head_dim = heads
    dtype = DTYPE_NAMES[shape.dtype]
    num_pages = CONTEXT // BLOCK_SIZE
    cache = PagedKVCache(1, num_pages, num_kv_heads, head_dim, dtype, device)
    metadata = AttentionMetadata.build(
        query_lens=[shape.query_len],
        context_lens=[CONTEXT],
        block_tables=[torch.randperm(num_pages).tolist()],
        device=device,
    )
    q = torch.randn(shape.query_len, num_heads, head_dim, device=device).to(dtype)

    def run() -> object:
        return mixed_with_triton(
            *(q, cache, 0, metadata),
            scale=head_dim**-0.5,
            window=None,
            softcap=None,
            sinks=None,
            tile=tile,
        )

    errors = importlib.import_module("triton.runtime.errors")
    try:
        return median_seconds(run, device)
    except errors.OutOfResources:  # more shared memory than a processor has
        return float("inf")


def main() -> int:
    """Measure this GPU, or write the rules down for another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("var/tuning"))
    parser.add_argument("--rules", choices=CAPABILITIES, help="no measurement: what the rules say")
    arguments = parser.parse_args()
    if arguments.rules is not None:
        by_rules(arguments.rules).write(SHIPPED / f"{arguments.rules.lower()}.json")
        return 0
    if not torch.cuda.is_available():
        print("No GPU is here: nothing can be measured. --rules writes down what the rules choose.")
        return 1
    table = measured(torch.device("cuda"))
    table.write(arguments.out / table_name(table.gpu, table.triton))
    return 0


if __name__ == "__main__":
    sys.exit(main())
