"""Penalties for repetition and logit bias, applied to the logits before sampling.

For a token seen c times in the output, or only in the prompt (c = 0), of a row with repetition
penalty r, frequency penalty f and presence penalty p:

    l' = (l / r if l > 0 else l * r) - f * c - p * [c > 0],      then l'' = l' + bias

Everything is a list of (row, token) pairs: the work follows the tokens that were seen, not the
vocabulary. Sources: CTRL, arXiv 1909.05858 (repetition); OpenAI's API reference (the other two).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowPenalties:
    """What one row of the logits is penalised for.

    prompt_token_ids matter to the repetition penalty alone; output_counts: token id -> times.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    prompt_token_ids: Iterable[int] = ()
    output_counts: Mapping[int, int] | None = None
    logit_bias: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """The same for a whole batch, as tensors on the logits' device.

    rows, token_ids, counts: [N] int64, distinct pairs; presence, frequency, repetition: [N] fp32 of
    their rows. bias_rows, bias_token_ids: [M] int64, distinct pairs; biases: [M] fp32.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    counts: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    bias_rows: torch.Tensor
    bias_token_ids: torch.Tensor
    biases: torch.Tensor

    @classmethod
    def build(
        cls, batch: Sequence[RowPenalties], device: torch.device | str = "cpu"
    ) -> Penalties | None:
        """Penalties of a batch, one entry a row of the logits; None where no row has any."""
        seen = [
            (row, token_id, count, penalties)
            for row, penalties in enumerate(batch)
            for token_id, count in _penalised_tokens(penalties).items()
        ]
        biased = [
            (row, token_id, bias)
            for row, penalties in enumerate(batch)
            for token_id, bias in (penalties.logit_bias or {}).items()
        ]
        if not seen and not biased:
            return None

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def floats(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            rows=integers([row for row, _, _, _ in seen]),
            token_ids=integers([token_id for _, token_id, _, _ in seen]),
            counts=integers([count for _, _, count, _ in seen]),
            presence=floats([penalties.presence for _, _, _, penalties in seen]),
            frequency=floats([penalties.frequency for _, _, _, penalties in seen]),
            repetition=floats([penalties.repetition for _, _, _, penalties in seen]),
            bias_rows=integers([row for row, _, _ in biased]),
            bias_token_ids=integers([token_id for _, token_id, _ in biased]),
            biases=floats([bias for _, _, bias in biased]),
        )


def _penalised_tokens(penalties: RowPenalties) -> dict[int, int]:
    """token id -> times in the output, of every token that some penalty of this row touches."""
    counts: dict[int, int] = {}
    if penalties.repetition != 1.0:
        counts.update(dict.fromkeys(penalties.prompt_token_ids, 0))
    if penalties.repetition != 1.0 or penalties.presence or penalties.frequency:
        counts.update(penalties.output_counts or {})
    return counts


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Change logits [B, V] in place."""
    if penalties.rows.numel():
        pair = (penalties.rows, penalties.token_ids)
        values = logits[pair].float()
        repetition = penalties.repetition
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= penalties.frequency * penalties.counts
        values -= penalties.presence * (penalties.counts > 0)
        logits[pair] = values.to(logits.dtype)
    if penalties.biases.numel():
        pair = (penalties.bias_rows, penalties.bias_token_ids)
        logits[pair] = (logits[pair].float() + penalties.biases).to(logits.dtype)
