"""Models that answer with one vector for each input: embeddings, and scores of pairs.

transformers' own modules compute them, a bucket at a time. An input is padded to a length that
depends on it alone, and shares a bucket with inputs that are padded alike: what else is in the step
changes no more than the rounding of the products.

The compiled CPU kernels are not used. Between torch's operations they would have to wake their
threads 36 times a step: one input of 16 tokens took 36 ms with them and 10 ms without
(all-MiniLM-L6-v2 in fp32, two cores), and long batches gained nothing.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.models.model import ModelSpec
from engine.models.original import Original, num_weight_bytes
from engine.pooling import Pooling
from kernels.attention_metadata import AttentionMetadata

SMALLEST_STEP = 16
"""Tokens between two padded lengths, up to 128 tokens; beyond, an eighth of the power of two."""

Tail = Callable[[torch.Tensor], torch.Tensor]
"""What is done with the pooled vectors: [S, hidden] -> [S, dimension]."""


@dataclass(frozen=True, slots=True)
class NoBlocks:
    """The KV cache of a model that keeps nothing: an input is computed in one step."""

    def copy_block(self, source: int, destination: int) -> None:
        """Nothing is kept, so nothing forks."""
        raise AssertionError("a pooled input never forks")


class PooledModel:
    """See `engine.models.model.Model`; `forward` answers with vectors in the place of logits."""

    def __init__(
        self, original: Original, pooling: Pooling, tail: Tail, *, is_padding: bool = True
    ) -> None:
        """`is_padding`: False computes every input by itself, for models that padding disturbs."""
        self._original = original
        self._pooling = pooling
        self._tail = tail
        self._is_padding = is_padding
        config = original.config.get_text_config()
        self._pad_id = int(getattr(config, "pad_token_id", None) or 0)
        accepted = inspect.signature(original.forward).parameters
        has_types = (getattr(config, "type_vocab_size", 0) or 0) > 1
        self._takes_types = has_types and "token_type_ids" in accepted
        self._options = {"use_cache": False} if "use_cache" in accepted else {}
        self._spec = ModelSpec(
            vocab_size=config.vocab_size,
            # The vector stands where an output token would, behind the longest input.
            context_length=pooling.max_tokens + 1,
            bytes_per_block=0,
            shares_blocks=False,
            weight_bytes=num_weight_bytes(original),
        )

    @property
    def spec(self) -> ModelSpec:
        """Its numbers; it has no KV cache."""
        return self._spec

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        device: torch.device = self._original.device
        return device

    def create_kv_cache(self, num_blocks: int) -> NoBlocks:
        """There is none."""
        return NoBlocks()

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: object,
        metadata: AttentionMetadata,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids: [T] of whole inputs -> [S, dimension]; `rows` are the ends of all of them."""
        return self.pool(token_ids, torch.zeros_like(token_ids), metadata.query_start)

    def pool(
        self, token_ids: torch.Tensor, types: torch.Tensor, query_start: torch.Tensor
    ) -> torch.Tensor:
        """token_ids, types: [T], query_start: [S + 1] -> what is answered, [S, dimension], fp32."""
        raw = self.raw(token_ids, types, query_start)
        if self._pooling.kind == "rerank":
            return raw if self._pooling.is_score_logit else raw.sigmoid()
        return torch.nn.functional.normalize(raw, dim=-1) if self._pooling.is_normalised else raw

    def raw(
        self, token_ids: torch.Tensor, types: torch.Tensor, query_start: torch.Tensor
    ) -> torch.Tensor:
        """What `pool` gives before the normalisation or the sigmoid."""
        starts = query_start.tolist()
        spans = list(zip(starts, starts[1:], strict=False))
        out = torch.empty((len(spans), self._pooling.dimension), device=self.device)
        for length, members in self._buckets([end - start for start, end in spans]):
            shape = (len(members), length)
            ids = torch.full(shape, self._pad_id, dtype=torch.int64, device=self.device)
            kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids)
            for row, member in enumerate(members):
                start, end = spans[member]
                ids[row, : end - start] = token_ids[start:end]
                kinds[row, : end - start] = types[start:end]
                mask[row, : end - start] = 1
            out[members] = self._compute(ids, kinds, mask)
        return out

    def _compute(self, ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One bucket, [B, L] each -> [B, dimension]."""
        options = self._options | ({"token_type_ids": types} if self._takes_types else {})
        answer = self._original(input_ids=ids, attention_mask=mask, **options)
        if self._pooling.kind == "rerank":
            logits: torch.Tensor = answer.logits.float()
            return logits
        return self._tail(pooled(answer.last_hidden_state.float(), mask, self._pooling.mode))

    def _buckets(self, lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
        """(padded length, the inputs of it).

        Those without any padding stay among themselves: transformers leaves their mask out.
        """
        if not self._is_padding:
            yield from ((length, [member]) for member, length in enumerate(lengths))
            return
        found: dict[tuple[int, bool], list[int]] = {}
        for member, length in enumerate(lengths):
            padded = min(padded_length(length), self._pooling.max_tokens)
            found.setdefault((padded, padded == length), []).append(member)
        yield from ((length, members) for (length, _), members in found.items())


def padded_length(length: int) -> int:
    """Up to 15 tokens more than `length`, beyond 128 tokens up to an eighth more."""
    step = max(SMALLEST_STEP, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def pooled(hidden: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """hidden: [B, L, hidden], mask: [B, L] -> [B, hidden], as sentence-transformers pools."""
    num_tokens = mask.sum(dim=1, keepdim=True)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, num_tokens[:, 0] - 1]
    if mode == "max":
        return hidden.masked_fill(mask[:, :, None] == 0, -1e9).amax(dim=1)
    total = (hidden * mask[:, :, None]).sum(dim=1)
    return total / (num_tokens.sqrt() if mode == "mean_sqrt_len_tokens" else num_tokens)
