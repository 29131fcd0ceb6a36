"""Adapters of the fused decoder: merged projections get what is added to their parts in one product.

    y[rows] += up (down x[rows]),    down = [A_q; A_k; A_v],  up = diagonal(s B_q, s B_k, s B_v)

Both products are the base model's own `linear`, so a row has the same bits whatever shares the step.
Where weights are smoothed (`engine.models.smoothing`), the factors are applied to A and B alike: what
is added to R W C is R (B A) C.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.adapters.rows import Groups
from engine.models.adapters.weights import Adapter, LowRank, refuse_misfit
from engine.models.decoder_config import DecoderConfig
from engine.models.smoothing import Factors
from kernels.gated_activation import silu_and_mul
from kernels.linear import PackedGatedLinear, PackedLinear, gate_and_up, linear


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a projection of the checkpoint is in the decoder."""

    projection: str
    start: int
    """Its first channel in the merged output."""
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Addend:
    """What one adapter adds to one projection, all its parts together."""

    down: PackedLinear
    """The parts' A, one below the other: [ranks, in]"""
    up: PackedLinear
    """The parts' s B, each in its own rows and columns: [out, ranks]"""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, in] -> [n, out], fp32"""
        return linear(linear(x, self.down), self.up, dtype=torch.float32)


class FusedAdapters:
    """The adapters of one decoder, by number. Replaced as a whole: a step keeps what it began with."""

    def __init__(
        self,
        config: DecoderConfig,
        smoothing: Mapping[str, Factors],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._places = _places(config)
        self._smoothing = smoothing
        self._dtype = dtype
        self._device = device
        self._by_number: dict[int, dict[str, _Addend]] = {}

    def attach(self, number: int, adapter: Adapter) -> None:
        """Pack an adapter under a number that was never used. Raises ModelRefused."""
        parts: dict[str, list[tuple[_Place, LowRank]]] = {}
        for module, low_rank in adapter.items():
            place = self._places.get(module)
            refuse_misfit(module, low_rank, None if place is None else place.shape)
            assert place is not None
            smoothed = self._smoothed(module, low_rank)
            parts.setdefault(place.projection, []).append((place, smoothed))
        self._by_number[number] = {name: self._addend(name, each) for name, each in parts.items()}

    def detach(self, number: int) -> None:
        """Forget an adapter; one that is not there is forgotten already."""
        self._by_number.pop(number, None)

    def add(self, projection: str, groups: Groups, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to `out` [n, out], which the base has computed of `x` [n, in], what adapters add."""
        for number, rows in groups:
            addend = self._by_number[number].get(projection)
            if addend is not None:
                product = addend.product(x.index_select(0, rows))
                out.index_add_(0, rows, product.to(out.dtype))

    def gate(
        self,
        projection: str,
        groups: Groups,
        x: torch.Tensor,
        base: PackedGatedLinear,
        out: torch.Tensor,
    ) -> None:
        """The same for a gated projection, whose parts have to be known before they are gated."""
        for number, rows in groups:
            addend = self._by_number[number].get(projection)
            if addend is not None:
                chosen = x.index_select(0, rows)
                both = gate_and_up(chosen, base) + addend.product(chosen)
                out.index_copy_(0, rows, silu_and_mul(both).to(out.dtype))

    def _smoothed(self, module: str, low_rank: LowRank) -> LowRank:
        factors = self._smoothing.get("head" if module == "lm_head" else f"{module}.weight")
        if factors is None:
            return low_rank
        return LowRank(
            Factors(columns=factors.columns).apply(low_rank.down),
            Factors(rows=factors.rows).apply(low_rank.up),
        )

    def _addend(self, projection: str, parts: list[tuple[_Place, LowRank]]) -> _Addend:
        places = [each for each in self._places.values() if each.projection == projection]
        num_outputs = sum(each.shape[0] for each in places)
        down = torch.cat([low_rank.down for _, low_rank in parts])
        up = torch.zeros(num_outputs, len(down))
        column = 0
        for place, low_rank in parts:
            size, rank = low_rank.up.shape
            up[place.start : place.start + size, column : column + rank] = low_rank.up
            column += rank
        return _Addend(*(PackedLinear(x.to(self._dtype).to(self._device)) for x in (down, up)))


def _places(config: DecoderConfig) -> dict[str, _Place]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    found = {"lm_head": _Place("head", 0, (config.vocab_size, hidden))}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        found |= {
            attention + "q_proj": _Place(prefix + "qkv", 0, (query, hidden)),
            attention + "k_proj": _Place(prefix + "qkv", query, (key, hidden)),
            attention + "v_proj": _Place(prefix + "qkv", query + key, (key, hidden)),
            attention + "o_proj": _Place(prefix + "output", 0, (hidden, query)),
            mlp + "gate_proj": _Place(prefix + "gate_up", 0, (intermediate, hidden)),
            mlp + "up_proj": _Place(prefix + "gate_up", intermediate, (intermediate, hidden)),
            mlp + "down_proj": _Place(prefix + "down", 0, (hidden, intermediate)),
        }
    return found
