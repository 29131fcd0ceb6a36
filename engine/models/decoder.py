"""The fused Llama-like decoder: merged projections, paged attention, logits only where wanted.

    h = embedding[token]
    h = h + O·attention(rope(norm(h)·[Q K V]));   h = h + D·(silu(g)·u),  [g u] = norm(h)·[G U]
    logits = norm(h)·head

The residual stream h is fp32 in every precision: bf16 rounding of a sum that runs through all
layers costs more accuracy than that of any product (8 times the KL divergence when measured).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.costs.calibration_cache import remembered, weight_files
from engine.errors import ModelRefused
from engine.models.adapters.fused import FusedAdapters
from engine.models.adapters.rows import AdapterRows, Groups
from engine.models.adapters.weights import Adapter
from engine.models.checkpoint import Checkpoint, read_json
from engine.models.decoder_config import DecoderConfig
from engine.models.kv_scales import KVScales
from engine.models.model import KVBlocks, ModelSpec
from engine.models.smoothing import (
    NUM_TOKENS,
    SMOOTHING_FORM,
    Factors,
    KeptFactors,
    Observer,
    Ranges,
    random_tokens,
    smoothing_factors,
)
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library as cpu
from kernels.cpu.decoder import CpuDecoder, CpuLayer, CpuLinear
from kernels.embedding import Embedding
from kernels.kv_cache import BLOCK_SIZE, FLOAT8, PagedKVCache
from kernels.linear import (
    PackedGatedLinear,
    PackedLinear,
    Quantization,
    gated_linear,
    linear,
)
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm
from kernels.rotary import QueryKeyNorms, build_cos_sin, rotary_and_write_kv

NO_ADAPTERS = AdapterRows(np.zeros(0, dtype=np.int32), tokens=(), samples=())


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer, merged and packed."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedGatedLinear
    down: PackedLinear
    window: int | None


class Decoder:
    """A model of the Llama structure. See `engine.models.model.Model`."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
        smoothing: dict[str, Factors] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.quantization = quantization
        self._device = device
        weights = Weights(config, checkpoint, dtype, device, quantization, smoothing or {})
        table = weights.embedding()
        self.layers = [weights.layer(index) for index in range(config.num_layers)]
        self.final_norm = weights.norm("model.norm.weight", config.hidden_size)
        self.head = self._create_head(weights, table)
        self._embedding = Embedding(table, self.head if config.has_tied_embeddings else None)
        self.kv_scales: KVScales | None = None
        """Of a cache of 8-bit floats."""
        if self.kv_dtype == FLOAT8:
            shape = (config.num_layers, config.num_kv_heads)
            self.kv_scales = KVScales.read(checkpoint, *shape)
        checkpoint.refuse_unread()
        self.cos_sin = build_cos_sin(
            config.context_length, config.head_dim, config.rope_theta, config.rope_scaling
        ).to(device)
        self._adapters = FusedAdapters(config, smoothing or {}, dtype, device)
        self._compiled = self._compile()
        library = cpu.active()
        is_widened = self._compiled is not None and library and not library.uses_native_bf16_dot
        self._between = torch.float32 if is_widened else dtype
        """Precision of what passes from one operation to the next: as the compiled step has it."""
        self._normed = torch.float32 if self._compiled is not None else dtype
        """And of what passes from a norm to a projection, which rounds it as its weights need it."""
        if self.kv_dtype == FLOAT8 and self.kv_scales is None:
            self.kv_scales = self._measured_kv_scales()

    @property
    def spec(self) -> ModelSpec:
        """Its numbers."""
        config = self.config
        return ModelSpec(
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            bytes_per_block=PagedKVCache.bytes_per_block(
                config.num_layers, config.num_kv_heads, config.head_dim, self.kv_dtype
            ),
            weight_bytes=sum(projection.num_bytes for projection in self._projections()),
        )

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self._device

    def _projections(self) -> Iterator[PackedLinear | PackedGatedLinear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
        yield self.head

    def create_kv_cache(self, num_blocks: int) -> PagedKVCache:
        """A zero-filled KV cache of its shape."""
        kv_cache = self._kv_cache(num_blocks, self.kv_dtype)
        if self.kv_scales is not None:
            self.kv_scales.write(kv_cache)
        return kv_cache

    def _kv_cache(self, num_blocks: int, dtype: torch.dtype) -> PagedKVCache:
        config = self.config
        shape = (config.num_layers, num_blocks, config.num_kv_heads, config.head_dim)
        return PagedKVCache(*shape, dtype, self._device)

    @torch.inference_mode()
    def _measured_kv_scales(self) -> KVScales:
        """By a prompt of random tokens, whose keys and values are kept as they are."""
        tokens = random_tokens(self.config.vocab_size, min(NUM_TOKENS, self.config.context_length))
        exact = self._kv_cache(-(-len(tokens) // BLOCK_SIZE), self.dtype)
        return KVScales.measure(self, tokens.to(self._device), exact)

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids: [T] int64, rows: [R] int64 -> logits of those rows: [R, vocab_size]."""
        assert isinstance(kv_cache, PagedKVCache)
        hidden = self._embedding.rows(token_ids)  # [T, hidden]
        if self._compiled is not None:
            return self._compiled.forward(hidden, kv_cache, metadata, rows)
        return self._forward_by_operations(hidden, kv_cache, metadata, rows)

    def attach(self, number: int, adapter: Adapter) -> None:
        """Keep an adapter under a number that was never used. Raises ModelRefused."""
        self._adapters.attach(number, adapter)

    def detach(self, number: int) -> None:
        """Forget an adapter that no sequence uses any more."""
        self._adapters.detach(number)

    @torch.inference_mode()
    def forward_adapted(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVBlocks,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        adapters: AdapterRows,
    ) -> torch.Tensor:
        """As `forward`, each row with the adapter of its sequence; operation by operation."""
        assert isinstance(kv_cache, PagedKVCache)
        hidden = self._embedding.rows(token_ids)  # [T, hidden]
        return self._forward_by_operations(hidden, kv_cache, metadata, rows, adapters=adapters)

    def observe_activations(self, token_ids: torch.Tensor, observe: Observer) -> None:
        """Run `token_ids` [T] as one prompt, and tell what enters each projection."""
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        self.run_prompt(token_ids, self.create_kv_cache(num_blocks), observe)

    def run_prompt(
        self,
        token_ids: torch.Tensor,
        kv_cache: PagedKVCache,
        observe: Observer = lambda name, x: None,
    ) -> None:
        """Leave the keys and values of one prompt [T] in the first blocks of the cache."""
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        metadata = AttentionMetadata.build(
            query_lens=[len(token_ids)],
            context_lens=[len(token_ids)],
            block_tables=[list(range(num_blocks))],
            device=self._device,
        )
        hidden = self._embedding.rows(token_ids)
        rows = torch.arange(len(token_ids), device=self._device)
        self._forward_by_operations(hidden, kv_cache, metadata, rows, observe)

    def _forward_by_operations(
        self,
        hidden: torch.Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
        observe: Observer = lambda name, x: None,
        adapters: AdapterRows = NO_ADAPTERS,
    ) -> torch.Tensor:
        """hidden: [T, hidden] fp32 -> logits of `rows`; one call for each operation."""
        added, groups = self._adapters, adapters.tokens
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            normed = self._norm(hidden, layer.input_norm, self._normed)
            observe(prefix + "qkv", normed)
            attended = self._attend(normed, layer, index, kv_cache, metadata, groups)
            observe(prefix + "output", attended)
            if index == last:  # beyond its KV, the last layer matters only where logits are wanted
                attended = attended.index_select(0, rows)
                hidden = hidden.index_select(0, rows)
                groups = adapters.samples
                if len(rows) == 0:
                    break
            hidden = self._added(attended, layer.output, hidden)
            added.add(prefix + "output", groups, attended, hidden)
            normed = self._norm(hidden, layer.mlp_norm, self._normed)
            observe(prefix + "gate_up", normed)
            gated = gated_linear(normed, layer.gate_up, dtype=self._between)
            added.gate(prefix + "gate_up", groups, normed, layer.gate_up, gated)
            observe(prefix + "down", gated)
            hidden = self._added(gated, layer.down, hidden)
            added.add(prefix + "down", groups, gated, hidden)
        if len(rows) == 0:
            return torch.empty((0, self.config.vocab_size), device=self._device)
        normed = self._norm(hidden, self.final_norm, self._normed)
        observe("head", normed)
        logits = self._logits(normed)
        added.add("head", groups, normed, logits)
        return logits

    def _compile(self) -> CpuDecoder | None:
        """The whole step as one call, where the C++ library has all of it."""
        config, library = self.config, cpu.active()
        is_packed = self.head.packed is not None and self.kv_dtype in cpu.DTYPES
        if library is None or not is_packed or not library.supports_head_dim(config.head_dim):
            return None
        return CpuDecoder(
            library,
            [_compiled_layer(layer) for layer in self.layers],
            self.final_norm.float(),
            _compiled_linear(self.head),
            cos_sin=self.cos_sin,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            kv_dtype=self.kv_dtype,
        )

    def _create_head(self, weights: "Weights", embedding: torch.Tensor) -> PackedLinear:
        """The projection to logits, which may be the embedding itself."""
        return weights.tied_head(embedding) if self.config.has_tied_embeddings else weights.head()

    def _added(
        self, x: torch.Tensor, projection: PackedLinear, hidden: torch.Tensor
    ) -> torch.Tensor:
        """The stream `hidden` with a projection of x on top."""
        return linear(x, projection, residual=hidden)

    def _logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab_size], fp32."""
        return linear(normed, self.head, dtype=torch.float32)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rms_norm(x, weight.to(dtype), self.config.rms_norm_eps)

    def _attend(
        self,
        normed: torch.Tensor,
        layer: DecoderLayer,
        index: int,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        groups: Groups,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, num_heads * head_dim]; writes this layer's KV."""
        config = self.config
        qkv = linear(normed, layer.qkv, dtype=self._between)
        self._adapters.add(f"model.layers.{index}.qkv", groups, normed, qkv)
        heads = qkv.view(len(qkv), -1, config.head_dim)  # [T, Hq + 2·Hkv, D]
        query, key, value = torch.split(
            heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            query_norm, key_norm = (w.to(self._between) for w in (layer.query_norm, layer.key_norm))
            norms = QueryKeyNorms(query_norm, key_norm, config.rms_norm_eps)
        rotary_and_write_kv(query, key, value, self.cos_sin, kv_cache, index, metadata, norms)
        attended = paged_attention(
            query, kv_cache, index, metadata, scale=config.head_dim**-0.5, window=layer.window
        )
        return attended.reshape(len(attended), -1)


def load_decoder(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    *,
    cache: Path | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Load a checkpoint of the Llama structure; raises ModelRefused with one clear sentence.

    `cache` is where the factors of smoothing are kept: without it each load finds them anew.
    `kv_dtype` is that of the KV cache where it is not to be `dtype`.
    """
    config = DecoderConfig.parse(read_json(directory / "config.json"))
    if quantization != "none" and not cpu.CpuLibrary.supports_head_dim(config.head_dim):
        raise ModelRefused("quantised weights need heads of a multiple of 16 channels")
    smoothing: dict[str, Factors] = {}
    if quantization == "int8":

        def observe() -> KeptFactors:
            return KeptFactors.of(_observed_factors(directory, config, dtype, device))

        facts = [SMOOTHING_FORM, *weight_files(directory), str(dtype), _build_name()]
        kept = observe() if cache is None else remembered(cache, facts, KeptFactors, observe)[0]
        smoothing = kept.factors
    checkpoint = Checkpoint(directory, device)
    return Decoder(config, checkpoint, dtype, device, quantization, smoothing, kv_dtype)


def _observed_factors(
    directory: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Factors]:
    """By running the model as it is; takes a second, and the memory of both."""
    ranges = Ranges()
    with torch.inference_mode():
        whole = Decoder(config, Checkpoint(directory, device), dtype, device)
        tokens = random_tokens(config.vocab_size, min(NUM_TOKENS, config.context_length))
        whole.observe_activations(tokens.to(device), ranges.observe)
    return smoothing_factors(config, Checkpoint(directory), ranges)


def _build_name() -> str:
    library = cpu.active()
    return "" if library is None else f"{library.path.name} {library.uses_native_bf16_dot}"


def _compiled_linear(linear: PackedLinear) -> CpuLinear:
    assert linear.packed is not None
    return CpuLinear(linear.packed, linear.bias)


def _compiled_layer(layer: DecoderLayer) -> CpuLayer:
    return CpuLayer(
        input_norm=layer.input_norm.float(),
        qkv=_compiled_linear(layer.qkv),
        query_norm=None if layer.query_norm is None else layer.query_norm.float(),
        key_norm=None if layer.key_norm is None else layer.key_norm.float(),
        output=_compiled_linear(layer.output),
        mlp_norm=layer.mlp_norm.float(),
        gate=_compiled_linear(layer.gate_up.gate),
        up=_compiled_linear(layer.gate_up.up),
        down=_compiled_linear(layer.down),
        window=layer.window,
    )


class Weights:
    """Reads, merges and packs the tensors of a checkpoint; lives while the model loads."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization,
        smoothing: dict[str, Factors],
    ) -> None:
        self.smoothing = smoothing
        self.config = config
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.quantization = quantization

    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden]"""
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._tensor("model.embed_tokens.weight", shape)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """[size]"""
        return self._tensor(name, (size,))

    def head(self) -> PackedLinear:
        """The checkpoint's own projection to logits."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._smoothed_head(self._tensor("lm_head.weight", shape))

    def tied_head(self, embedding: torch.Tensor) -> PackedLinear:
        """The same rows as those of the embedding."""
        self.checkpoint.skip("lm_head.weight")
        return self._smoothed_head(embedding)

    def _smoothed_head(self, weight: torch.Tensor) -> PackedLinear:
        factors = self.smoothing.get("head")
        smoothed = weight if factors is None else factors.apply(weight)
        return PackedLinear(smoothed, quantization=self.quantization)

    def layer(self, index: int) -> DecoderLayer:
        """All of one layer."""
        config = self.config
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        query_size = config.num_heads * config.head_dim
        key_size = config.num_kv_heads * config.head_dim
        qkv = [("q_proj", query_size), ("k_proj", key_size), ("v_proj", key_size)]
        output, down = (
            [(attention + "o_proj", config.hidden_size)],
            [(mlp + "down_proj", config.hidden_size)],
        )
        has_norm = config.has_qk_norm
        head_norm = attention + "{}_norm.weight"
        return DecoderLayer(
            input_norm=self.norm(prefix + "input_layernorm.weight", config.hidden_size),
            qkv=self._linear(
                [(attention + name, size) for name, size in qkv],
                config.hidden_size,
                config.has_qkv_bias,
            ),
            query_norm=self.norm(head_norm.format("q"), config.head_dim) if has_norm else None,
            key_norm=self.norm(head_norm.format("k"), config.head_dim) if has_norm else None,
            output=self._linear(output, query_size, config.has_output_bias),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._gate_up(mlp),
            down=self._linear(down, config.intermediate_size, config.has_mlp_bias),
            window=config.windows[index],
        )

    def _linear(
        self, parts: list[tuple[str, int]], in_features: int, has_bias: bool
    ) -> PackedLinear:
        """One projection from several of the checkpoint, stacked along the output."""
        weight = [self._tensor(name + ".weight", (size, in_features)) for name, size in parts]
        bias = [self._tensor(name + ".bias", (size,)) for name, size in parts] if has_bias else []
        return PackedLinear(torch.cat(weight), torch.cat(bias) if bias else None, self.quantization)

    def _gate_up(self, mlp: str) -> PackedGatedLinear:
        size = self.config.intermediate_size
        names = (mlp + "gate_proj", mlp + "up_proj")
        gate, up = (self._tensor(n + ".weight", (size, self.config.hidden_size)) for n in names)
        gate_bias, up_bias = (
            self._tensor(n + ".bias", (size,)) if self.config.has_mlp_bias else None for n in names
        )
        return PackedGatedLinear(gate, up, gate_bias, up_bias, self.quantization)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        factors = self.smoothing.get(name)
        if factors is None:
            return self.checkpoint.tensor(name, shape, self.dtype).to(self.device)
        return factors.apply(self.checkpoint.tensor(name, shape, torch.float32)).to(self.device)
