"""What this machine can do at best, measured in the same run as the figures beside it.

Matrix rate: the best of torch's and our own packed GEMM on a shape of the model; memory: a read
loop over far more bytes than the last-level cache holds. Both with the threads that the engine
uses. A limit is what remains when softmax, sampling, HTTP and Python cost nothing.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

REPETITIONS = 5


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Rates of one machine in one precision."""

    dtype: str
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one token costs, from the model's config: FLOPs, and bytes that must be read."""

    layer_parameters: int
    head_parameters: int
    num_layers: int
    kv_width: int
    """Keys and values of one token in one layer, in elements."""
    query_width: int
    bytes_per_element: int

    @classmethod
    def from_directory(cls, directory: Path, bytes_per_element: int) -> "ModelCost":
        """Read `config.json` of a Llama-shaped model."""
        config = json.loads((directory / "config.json").read_text())
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // num_heads
        num_kv_heads = config.get("num_key_value_heads", num_heads)
        attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
        return cls(
            layer_parameters=config["num_hidden_layers"] * (attention + 3 * hidden * intermediate),
            head_parameters=config["vocab_size"] * hidden,
            num_layers=config["num_hidden_layers"],
            kv_width=2 * num_kv_heads * head_dim,
            query_width=num_heads * head_dim,
            bytes_per_element=bytes_per_element,
        )

    def prefill_s(self, num_tokens: int, limits: MachineLimits) -> float:
        """Least seconds to prefill one prompt: every product at the matrix rate."""
        linear = 2 * self.layer_parameters * num_tokens + 2 * self.head_parameters
        attention = 4 * self.num_layers * self.query_width * num_tokens * num_tokens / 2
        return (linear + attention) / limits.flops_per_s

    def decode_s(self, batch: int, context: int, limits: MachineLimits) -> float:
        """Least seconds of one decode step: weights at the slower of both limits, then the KV."""
        parameters = self.layer_parameters + self.head_parameters
        weights = max(
            parameters * self.bytes_per_element / limits.bytes_per_s,
            2 * parameters * batch / limits.flops_per_s,
        )
        kv_bytes = batch * context * self.num_layers * self.kv_width * self.bytes_per_element
        return weights + kv_bytes / limits.bytes_per_s


def measure_limits(dtype: str, num_threads: int) -> MachineLimits:
    """Measure this machine now. Takes about two seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        return MachineLimits(dtype, _matrix_rate(torch_dtype), _read_rate())
    finally:
        torch.set_num_threads(before)


def _best_s(run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def _matrix_rate(dtype: torch.dtype) -> float:
    rows, inner, outputs = 1024, 1536, 1536
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outputs, inner).to(dtype)
    flops = 2 * rows * inner * outputs
    return max(
        flops * 4 / _best_s(lambda: [torch.nn.functional.linear(x, weight) for _ in range(4)]),
        flops * 4 / _best_s(lambda: [torch.mm(x, weight.T) for _ in range(4)]),
    )


def _read_rate() -> float:
    block = torch.ones(256 * 1024 * 1024 // 4, dtype=torch.float32)
    return block.numel() * 4 / _best_s(block.sum)
