"""Attention and rotary as a GPU's kernels do them: nothing is read back, no shape depends on a length.

They stand in for Triton's, which this machine cannot run, where a test must not meet the CPU's own.
"""

import pytest
import torch

from kernels.attention_metadata import AttentionMetadata
from kernels.kv_cache import PagedKVCache


def attend(
    q: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Every token against the whole width of its sequence's table."""
    tokens = torch.arange(len(q))
    owner = torch.searchsorted(metadata.query_start, tokens, right=True) - 1
    tables = metadata.block_tables.index_select(0, owner).long()
    places = torch.arange(tables.shape[1] * kv_cache.block_size)
    visible = places[None] <= metadata.positions[:, None]
    if window is not None:
        visible = visible & (places[None] > metadata.positions[:, None] - window)
    tables = tables.clamp(0, kv_cache.num_blocks - 1)
    keys, values = (
        pages[layer].index_select(0, tables.view(-1)).view(*tables.shape, *pages[layer].shape[1:])
        for pages in (kv_cache.keys, kv_cache.values)
    )
    keys, values = (
        _per_head(each.transpose(1, 2).flatten(2, 3), q.shape[1]) for each in (keys, values)
    )
    scores = torch.einsum("thd,thpd->thp", q.float(), keys.float()) * scale
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return torch.einsum("thp,thpd->thd", scores.softmax(-1), values.float()).to(q.dtype)


def _per_head(each: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[T, H_kv, P, D] -> [T, num_heads, P, D]."""
    group = num_heads // each.shape[1]
    return each[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    norms: None = None,
) -> None:
    """q in place, k and v into their pages; of models whose heads have no norms."""
    assert norms is None
    angles = cos_sin.index_select(0, metadata.positions)
    cos, sin = angles.flatten(1).chunk(2, dim=-1)
    for each in (q, k):
        first, second = each.float().chunk(2, dim=-1)
        turned = (
            first * cos[:, None] - second * sin[:, None],
            second * cos[:, None] + first * sin[:, None],
        )
        each.copy_(torch.cat(turned, dim=-1))
    kv_cache.write(layer, metadata.slot_mapping, k, v)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.decoder.paged_attention", attend)
    monkeypatch.setattr("engine.models.decoder.rotary_and_write_kv", rotate_and_write)
