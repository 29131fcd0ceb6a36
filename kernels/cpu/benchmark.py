"""Runs the operations of one model's forward pass and prints them as fractions of the machine.

    python -m kernels.cpu.benchmark [--precision int8] [--threads 2] [--target avx2] [--cache DIR]

The limits are measured in the same run: multiply-adds in registers (of integers, for the products
of int8), and a stream read from memory. An operation's limit is the larger of its arithmetic at the
first rate and its traffic at the second (weights and KV pages; activations stay in the caches).
Weights are random, their layers are all different memory, so that a step reads what a real one
reads. The figure of a product of int8 includes quantising the rows that it multiplies.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library
from kernels.cpu.build import AVX2, NATIVE
from kernels.cpu.heap import keep_freed_memory
from kernels.gated_activation import silu_and_mul
from kernels.kv_cache import PagedKVCache
from kernels.linear import PackedLinear, Quantization, linear
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import build_cos_sin, rotary_and_write_kv

EPS = 1e-5
READ_BYTES = 1 << 30  # well beyond a third-level cache that many machines share
CONTEXT = 288


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights are stored in, and everything else."""

    dtype: torch.dtype
    quantization: Quantization = "none"

    @property
    def bytes_per_weight(self) -> int:
        """As a product reads it; the scales count as nothing."""
        return self.dtype.itemsize if self.quantization == "none" else 1


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "bf16": Precision(torch.bfloat16),
    "int8": Precision(torch.bfloat16, "int8"),
    "int8_weight_only": Precision(torch.bfloat16, "int8_weight_only"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's numbers; the default is SmolLM2-135M."""

    num_layers: int = 30
    hidden: int = 576
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 1536
    vocabulary: int = 49152


@dataclass(frozen=True, slots=True)
class Limits:
    """Operations and bytes per second that this machine reaches at most."""

    operations_per_s: float
    products_per_s: float
    """Operations of a product with weights, in their precision."""
    bytes_per_s: float

    def seconds(self, name: str, operations: float, num_bytes: float) -> float:
        """The least time for this much arithmetic and traffic, perfectly overlapped."""
        rate = self.operations_per_s if name == "attention" else self.products_per_s
        return max(operations / rate, num_bytes / self.bytes_per_s)


class Decoder:
    """The operations of a decoder in the engine's order, each timed by name."""

    def __init__(self, shape: Shape, precision: Precision, num_blocks: int) -> None:
        self.shape = shape
        self.precision = precision
        dtype = precision.dtype
        heads = shape.num_heads + 2 * shape.num_kv_heads
        sizes = {
            "qkv": (heads * shape.head_dim, shape.hidden),
            "output": (shape.hidden, shape.num_heads * shape.head_dim),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        self.layers = [
            {name: self._weight(*size) for name, size in sizes.items()}
            for _ in range(shape.num_layers)
        ]
        self.head = self._weight(shape.vocabulary, shape.hidden)
        self.norm = torch.ones(shape.hidden, dtype=dtype)
        self.cos_sin = build_cos_sin(8192, shape.head_dim, 1e5)
        self.kv_cache = PagedKVCache(
            shape.num_layers, num_blocks, shape.num_kv_heads, shape.head_dim, dtype, "cpu"
        )
        for pages in (*self.kv_cache.keys, *self.kv_cache.values):
            pages.normal_()
        self.seconds: dict[str, float] = defaultdict(float)

    def _weight(self, out_features: int, in_features: int) -> PackedLinear:
        weight = torch.randn(out_features, in_features) * in_features**-0.5
        return PackedLinear(
            weight.to(self.precision.dtype), quantization=self.precision.quantization
        )

    def _timed(
        self,
        name: str,
        operation: Callable[..., torch.Tensor],
        *arguments: object,
        **options: object,
    ) -> torch.Tensor:
        started = time.perf_counter()
        result = operation(*arguments, **options)
        self.seconds[name] += time.perf_counter() - started
        return result

    def forward(
        self, hidden: torch.Tensor, metadata: AttentionMetadata, rows: torch.Tensor
    ) -> torch.Tensor:
        """hidden: [T, hidden] fp32 -> logits of `rows`."""
        shape, timed = self.shape, self._timed
        split = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        for i, layer in enumerate(self.layers):
            normed = timed("norm", rms_norm, hidden, self.norm, EPS)
            qkv = timed("qkv", linear, normed, layer["qkv"])
            heads = qkv.view(len(qkv), -1, shape.head_dim)
            q, k, v = torch.split(heads, split, dim=1)
            started = time.perf_counter()
            rotary_and_write_kv(q, k, v, self.cos_sin, self.kv_cache, i, metadata)
            self.seconds["rotary"] += time.perf_counter() - started
            scale = shape.head_dim**-0.5
            attended = timed(
                "attention", paged_attention, q, self.kv_cache, i, metadata, scale=scale
            ).flatten(1)
            hidden = timed("output", linear, attended, layer["output"], residual=hidden)
            normed = timed("norm", rms_norm, hidden, self.norm, EPS)
            gate_up = timed("gate_up", linear, normed, layer["gate_up"])
            gated = timed("silu", silu_and_mul, gate_up)
            hidden = timed("down", linear, gated, layer["down"], residual=hidden)
        last = hidden[rows]
        return timed("head", lambda: linear(rms_norm(last, self.norm, EPS), self.head))


def costs(
    shape: Shape, precision: Precision, query_lens: list[int], context_lens: list[int]
) -> dict[str, tuple[float, float]]:
    """(operations, bytes) of a step by operation; the small ones count as nothing."""
    num_tokens, num_rows = sum(query_lens), len(query_lens)
    width = shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    elements = {
        "qkv": (width + 2 * kv_width) * shape.hidden,
        "output": shape.hidden * width,
        "gate_up": 2 * shape.intermediate * shape.hidden,
        "down": shape.hidden * shape.intermediate,
    }
    layers = shape.num_layers
    result = {
        name: (2.0 * layers * num_tokens * n, float(layers * n * precision.bytes_per_weight))
        for name, n in elements.items()
    }
    head = shape.vocabulary * shape.hidden
    result["head"] = (2.0 * num_rows * head, float(head * precision.bytes_per_weight))
    seen = sum(
        n * (c - n) + n * (n + 1) // 2 for n, c in zip(query_lens, context_lens, strict=True)
    )
    traffic = 2 * sum(context_lens) * kv_width * precision.dtype.itemsize
    result["attention"] = (4.0 * layers * width * seen, float(layers * traffic))
    return result


def run_case(
    decoder: Decoder, limits: Limits, name: str, query_lens: list[int], context_lens: list[int]
) -> None:
    """Time one kind of step, and print its operations and their fractions of the limit."""
    num_pages = [-(-length // 64) for length in context_lens]
    order = torch.randperm(decoder.kv_cache.num_blocks).tolist()
    tables = [[order.pop() for _ in range(n)] for n in num_pages]
    metadata = AttentionMetadata.build(
        query_lens=query_lens, context_lens=context_lens, block_tables=tables
    )
    hidden = torch.randn(sum(query_lens), decoder.shape.hidden)
    rows = metadata.query_start[1:].long() - 1
    for _ in range(2):
        decoder.forward(hidden, metadata, rows)
    repeats: list[tuple[float, dict[str, float]]] = []
    started = time.perf_counter()
    while len(repeats) < 5 or time.perf_counter() - started < 1.0:
        decoder.seconds.clear()
        before = time.perf_counter()
        decoder.forward(hidden, metadata, rows)
        repeats.append((time.perf_counter() - before, dict(decoder.seconds)))
    repeats.sort(key=lambda repeat: repeat[0])
    elapsed, seconds = repeats[len(repeats) // 2]
    best = repeats[0][0]
    cost = costs(decoder.shape, decoder.precision, query_lens, context_lens)
    least = {key: limits.seconds(key, *value) for key, value in cost.items()}
    sys.stdout.write(
        f"{name}: median {elapsed * 1e3:.2f} ms, best {best * 1e3:.2f} ms, "
        f"limit {sum(least.values()) * 1e3:.2f} ms: {sum(least.values()) / elapsed:.0%}\n"
    )
    for key, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        note = ""
        if key in cost:
            operations, num_bytes = cost[key]
            note = (
                f"{operations / spent / 1e9:8.0f} GOP/s {num_bytes / spent / 1e9:7.1f} GB/s"
                f" {least[key] / spent:6.0%}"
            )
        sys.stdout.write(f"    {key:10} {spent * 1e3:8.2f} ms {note}\n")


def measure_limits(cpu: library.CpuLibrary, precision: Precision) -> Limits:
    """The best of a few measurements each."""
    memory = torch.ones(READ_BYTES, dtype=torch.uint8)
    units = [cpu.measure_multiply_add]
    if precision.dtype == torch.bfloat16:
        units.append(cpu.measure_bf16_dot)
    floats = max(measure(0.3) for measure in units for _ in range(2))
    is_integer = precision.quantization == "int8"
    return Limits(
        operations_per_s=floats,
        products_per_s=max(cpu.measure_int8_dot(0.3) for _ in range(2)) if is_integer else floats,
        bytes_per_s=max(cpu.measure_read(memory) for _ in range(4)),
    )


def main() -> int:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", choices=("native", "avx2"), default="native")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "ncompass-cpu")
    arguments = parser.parse_args()
    precision = PRECISIONS[arguments.precision]
    built = library.build(arguments.cache, AVX2 if arguments.target == "avx2" else NATIVE)
    if built.path is None:
        sys.stdout.write(f"{built.reason}\n")
        return 1
    torch.set_num_threads(1)
    keep_freed_memory()
    cpu = library.enable(built.path, arguments.threads)
    limits = measure_limits(cpu, precision)
    sys.stdout.write(
        f"{arguments.precision}, {arguments.threads} threads, vectors of {cpu.vector_width}, "
        f"{'native bf16 dot' if cpu.uses_native_bf16_dot else 'multiply-adds'}: "
        f"limits {limits.operations_per_s / 1e9:.0f} GFLOP/s, "
        f"products {limits.products_per_s / 1e9:.0f} GOP/s, {limits.bytes_per_s / 1e9:.1f} GB/s\n"
    )
    decoder = Decoder(Shape(), precision, num_blocks=700)
    for name, query_lens, context_lens in (
        ("prefill 256", [256], [256]),
        ("prefill 1024", [1024], [1024]),
        ("decode 1", [1], [CONTEXT]),
        ("decode 16", [1] * 16, [CONTEXT] * 16),
        ("decode 64", [1] * 64, [CONTEXT] * 64),
        ("decode 1 at 8192", [1], [8192]),
        ("prefill 256 with decode 32", [256] + [1] * 32, [256] + [CONTEXT] * 32),
    ):
        run_case(decoder, limits, name, query_lens, context_lens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
