"""Tiers two and three: transformers' modules, over our paged cache or over a cache of their own.

Importing this module imports transformers, which takes seconds: the fused tier never needs it.
"""

from pathlib import Path

import torch

from engine.context import context_length
from engine.errors import ModelRefused
from engine.models.checkpoint import read_json
from engine.models.dry_run import NotHookable, record_attention
from engine.models.hooked import HookedModel
from engine.models.model import Model
from engine.models.original import Original, load_original, one_line
from engine.models.own_cache import Continuation, OwnCacheModel
from engine.models.report import Check, LoadReport
from engine.models.verification import RESUME, Reference, checks, references

UNSTEADY = "after a preemption it goes on in another way, as the original does when it starts over"
"""Models that look ahead in their prompt, for one: their output as a prompt is another prompt."""


def checks_of_fused(
    decoder: Model, directory: Path, dtype: torch.dtype, device: torch.device
) -> tuple[Check, ...]:
    """The first tier beside its original, which is loaded for it and dropped again."""
    original = load_original(directory, dtype, device)
    return checks(decoder, references(original, decoder.spec.vocab_size), dtype)


def load_with_transformers(
    directory: Path, dtype: torch.dtype, device: torch.device, not_fused: str
) -> tuple[Model, LoadReport]:
    """Tiers two and three; `not_fused` says why not the first. Raises ModelRefused."""
    original = load_original(directory, dtype, device)
    length = context_length(read_json(directory / "config.json"))
    try:
        vocab_size = original.config.get_text_config().vocab_size
        originals = references(original, vocab_size)
    except Exception as fault:
        raise ModelRefused(
            f"transformers cannot generate with this model: {one_line(fault)}"
        ) from (fault)
    reason = not_fused
    attention = original.config._attn_implementation
    try:
        return _hooked(original, originals, dtype, length, reason)
    except NotHookable as refusal:
        reason = f"{reason}; and {refusal}"
    except Exception as fault:  # a foreign model may fail in any way under a hook
        reason = f"{reason}; and under the attention hook it fails with {one_line(fault)}"
    original.set_attn_implementation(attention)
    return _with_own_cache(original, originals, dtype, length, reason)


def _hooked(
    original: Original,
    originals: list[Reference],
    dtype: torch.dtype,
    length: int,
    reason: str,
) -> tuple[Model, LoadReport]:
    calls = record_attention(original)
    vocab_size = originals[0].logits.shape[1]
    model = HookedModel(original, calls, vocab_size, length)
    found = checks(model, originals, dtype)
    if failed := _failures(found):
        raise NotHookable(f"under the attention hook its logits differ: {failed}")
    return model, LoadReport("attention hook", reason, found)


def _with_own_cache(
    original: Original,
    originals: list[Reference],
    dtype: torch.dtype,
    length: int,
    reason: str,
) -> tuple[Model, LoadReport]:
    vocab_size = originals[0].logits.shape[1]
    problems = []
    unsteady: tuple[Model, LoadReport] | None = None
    for continuation in Continuation:
        try:
            model = OwnCacheModel(original, continuation, vocab_size, length)
            found = checks(model, originals, dtype)
        except Exception as fault:  # the next way may still work
            problems.append(f"{continuation} {one_line(fault)}")
            continue
        because = "; ".join([reason, *problems])
        if not (failed := _failures(found)):
            return model, LoadReport(f"own cache, {continuation}", because, found)
        if all(check.is_passed for check in found if check.name != RESUME) and not unsteady:
            because += f"; {UNSTEADY}"
            unsteady = model, LoadReport(f"own cache, {continuation}", because, found)
        problems.append(f"{continuation} its logits differ: {failed}")
    if unsteady is not None:
        return unsteady
    raise ModelRefused("no tier computes what the original does: " + "; ".join(problems))


def _failures(found: tuple[Check, ...]) -> str:
    return ", ".join(str(check) for check in found if not check.is_passed)
