"""The launches of a whole step of the fused decoder, in the order in which it makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.benchmarks.launches import (
    AttentionLaunch,
    EmbeddingLaunch,
    GatedLaunch,
    Launch,
    LinearLaunch,
    RmsNormLaunch,
    RotaryLaunch,
    SamplingLaunch,
)
from kernels.kv_cache import BLOCK_SIZE

STREAM_BYTES = 4
"""The residual stream is fp32 in every precision."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a Llama-like model."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    element_bytes: int = 2
    cache_bytes: int = 2

    @property
    def qkv_size(self) -> int:
        """Outputs of the merged projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def attention(self, query_lens: tuple[int, ...], contexts: tuple[int, ...]) -> AttentionLaunch:
        """One layer's attention."""
        return AttentionLaunch(
            query_lens=query_lens,
            context_lens=contexts,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            element_bytes=self.element_bytes,
            cache_bytes=self.cache_bytes,
            block_size=BLOCK_SIZE,
        )

    def sampling(self, num_rows: int) -> SamplingLaunch:
        """The draw of a step's tokens."""
        return SamplingLaunch(num_rows, self.vocabulary, self.element_bytes)

    def step(self, query_lens: tuple[int, ...], contexts: tuple[int, ...]) -> list[Launch]:
        """Every launch of a step that samples one token of each sequence."""
        size, num_tokens, num_rows = self.element_bytes, sum(query_lens), len(query_lens)
        launches: list[Launch] = [EmbeddingLaunch(num_tokens, self.hidden, size)]
        for index in range(self.num_layers):
            is_last = index == self.num_layers - 1
            launches += self._attention_half(query_lens, contexts)
            launches += self._mlp_half(num_rows if is_last else num_tokens)
        launches.append(self._norm(num_rows))
        launches.append(self._linear(num_rows, self.hidden, self.vocabulary))
        launches.append(self.sampling(num_rows))
        return launches

    def _attention_half(
        self, query_lens: tuple[int, ...], contexts: tuple[int, ...]
    ) -> Iterator[Launch]:
        num_tokens = sum(query_lens)
        yield self._norm(num_tokens)
        yield self._linear(num_tokens, self.hidden, self.qkv_size)
        yield RotaryLaunch(
            num_tokens,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            value_dim=self.head_dim,
            rotary_dim=self.head_dim,
            element_bytes=self.element_bytes,
            cache_bytes=self.cache_bytes,
        )
        yield self.attention(query_lens, contexts)

    def _mlp_half(self, num_tokens: int) -> Iterator[Launch]:
        """The output projection too: in the last layer both have only the rows that are wanted."""
        query_size = self.num_heads * self.head_dim
        yield self._linear(num_tokens, query_size, self.hidden, is_added=True)
        yield self._norm(num_tokens)
        yield self._linear(num_tokens, self.hidden, 2 * self.intermediate)
        yield GatedLaunch(num_tokens, self.intermediate, self.element_bytes)
        yield self._linear(num_tokens, self.intermediate, self.hidden, is_added=True)

    def _norm(self, num_rows: int) -> RmsNormLaunch:
        return RmsNormLaunch(num_rows, self.hidden, STREAM_BYTES, self.element_bytes)

    def _linear(
        self, num_tokens: int, in_features: int, out_features: int, *, is_added: bool = False
    ) -> LinearLaunch:
        size = self.element_bytes
        residual_bytes = STREAM_BYTES if is_added else 0
        return LinearLaunch(
            num_tokens, in_features, out_features, size, size, size, residual_bytes=residual_bytes
        )


LLAMA_8B = DecoderShape(
    name="Llama-3.1-8B",
    num_layers=32,
    hidden=4096,
    intermediate=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocabulary=128_256,
)
QWEN3_32B = DecoderShape(
    name="Qwen3-32B",
    num_layers=64,
    hidden=5120,
    intermediate=25600,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
)
SMOLLM_135M = DecoderShape(
    name="SmolLM2-135M",
    num_layers=30,
    hidden=576,
    intermediate=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocabulary=49_152,
)
SHAPES = (LLAMA_8B, QWEN3_32B, SMOLLM_135M)
