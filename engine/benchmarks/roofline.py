"""The least seconds that a step can take: the model's arithmetic against the machine's rates.

The rates are measured in the run that divides by them. A limit is what remains when softmax,
sampling, HTTP and Python cost nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.models.checkpoint import read_json
from engine.models.decoder_config import DecoderConfig
from kernels.benchmarks.limits import measure_limits
from kernels.cpu import library

MEASUREMENT_S = 0.1
READ_BYTES = 512 << 20

Precision = Literal["fp32", "bf16", "int8"]
"""int8: quantised weights and activations, everything else in bf16."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
BYTES_PER_WEIGHT: dict[Precision, int] = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Limits:
    """What this machine reaches at most, all threads together."""

    bytes_per_s: float
    operations_per_s: float
    """Of attention."""
    products_per_s: float
    """Operations of a product with weights, in their precision."""

    def best_of(self, other: "Limits") -> "Limits":
        """The better of two measurements, before and after: the machine may have been disturbed."""
        return Limits(
            max(self.bytes_per_s, other.bytes_per_s),
            max(self.operations_per_s, other.operations_per_s),
            max(self.products_per_s, other.products_per_s),
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What the model's arithmetic amounts to, per token."""

    layer_weights: int
    head_weights: int
    attention_width: int
    """Query elements of a token in all layers."""
    kv_elements: int
    """Keys and values of one token in all layers."""
    bytes_per_weight: int
    bytes_per_kv: int

    @classmethod
    def of(cls, path: Path, precision: Precision) -> "Work":
        """From the shape of the checkpoint in `path`."""
        config = DecoderConfig.parse(read_json(path / "config.json"))
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = config.hidden_size * (2 * query + 2 * kv)
        mlp = 3 * config.hidden_size * config.intermediate_size
        return cls(
            layer_weights=config.num_layers * (attention + mlp),
            head_weights=config.vocab_size * config.hidden_size,
            attention_width=config.num_layers * query,
            kv_elements=2 * config.num_layers * kv,
            bytes_per_weight=BYTES_PER_WEIGHT[precision],
            bytes_per_kv=4 if precision == "fp32" else 2,
        )

    def prefill_s(self, num_tokens: int, limits: Limits) -> float:
        """Least seconds to prefill one prompt alone: only its last token needs the head."""
        return (
            self._products_s(self.layer_weights, num_tokens, limits)
            + self._products_s(self.head_weights, 1, limits)
            + self._prompt_attention_s(num_tokens, limits)
        )

    def decode_s(self, batch: int, context: int, limits: Limits) -> float:
        """Least seconds to decode one token of each sequence."""
        kv_bytes = batch * context * self.kv_elements * self.bytes_per_kv
        weights = self.layer_weights + self.head_weights
        return self._products_s(weights, batch, limits) + kv_bytes / limits.bytes_per_s

    def burst_s(self, num_requests: int, num_prompt: int, num_output: int, limits: Limits) -> float:
        """Least seconds to serve a burst: its prompts, then steps that decode all of it.

        Prompts may share their steps, so reading weights for them counts as nothing here.
        """
        products = 2 * (self.layer_weights * num_prompt + self.head_weights)
        prompt_s = products / limits.products_per_s + self._prompt_attention_s(num_prompt, limits)
        decode_s = self.decode_s(num_requests, num_prompt + num_output // 2, limits)
        return num_requests * prompt_s + (num_output - 1) * decode_s

    def _products_s(self, weights: int, num_rows: int, limits: Limits) -> float:
        """Their arithmetic or reading them once, whichever takes longer."""
        return max(
            weights * self.bytes_per_weight / limits.bytes_per_s,
            2 * weights * num_rows / limits.products_per_s,
        )

    def _prompt_attention_s(self, num_tokens: int, limits: Limits) -> float:
        """Arithmetic alone: what it reads was just written."""
        operations = 4 * self.attention_width * num_tokens * num_tokens / 2
        return operations / limits.operations_per_s


def machine_limits(precision: Precision) -> Limits:
    """The best that anything reaches here: torch's product and copy, our own loops beside them."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    limits = measure_limits(torch.device("cpu"), dtype)
    compiled = library.active()
    if compiled is None:
        return Limits(limits.bytes_per_s, limits.operations_per_s, limits.operations_per_s)
    rates = [compiled.measure_multiply_add(MEASUREMENT_S)]
    if dtype == torch.bfloat16:
        rates.append(compiled.measure_bf16_dot(MEASUREMENT_S))
    floats = max(limits.operations_per_s, *rates)
    products = compiled.measure_int8_dot(MEASUREMENT_S) if precision == "int8" else floats
    memory = torch.ones(READ_BYTES, dtype=torch.uint8)
    read = max(compiled.measure_read(memory) for _ in range(3))
    return Limits(max(limits.bytes_per_s, read), floats, products)
