"""What is known of a checkpoint before it is loaded: its licence, its structure, whether it fits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelRefused
from engine.memory.footprint import Footprint, StoredWeights, read_footprint, told_bytes
from engine.messages import Heartbeat
from infra.local.model_files import ModelFacts, read_config, read_model_facts

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2}
NOT_FOR_HIRE = ("nc", "noncommercial", "non-commercial", "research")
"""Words of licences that forbid what a platform does."""
SHOWN_TOKENS = 4_096
LICENCE_HEAD_BYTES = 400


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint that may be hosted."""

    facts: ModelFacts
    footprint: Footprint
    licence: str
    fit: str
    """One sentence for the operator."""


def inspect(
    directory: Path,
    licence: str,
    beats: Sequence[Heartbeat],
    stored: StoredWeights | None = None,
) -> Inspection:
    """Everything that can be said before loading. Raises ModelRefused with the reason.

    `licence` is the operator's word; `beats` say what the workers have room for; `stored` is what is
    known of weights that are not there yet.
    """
    facts = read_model_facts(directory, None if stored is None else stored.file_bytes)
    config = read_config(directory)
    if config.get("auto_map"):
        raise ModelRefused("the checkpoint brings code of its own, and that is never run")
    licence = licence or read_licence(directory)
    dtype = worker_dtype(beats)
    if facts.kind != "generate":
        dtype = "fp32"  # as the engine loads what pools
    footprint = read_footprint(directory, BYTES_PER_ELEMENT[dtype], stored)
    return Inspection(facts, footprint, licence, _fit(footprint, dtype, beats))


def worker_dtype(beats: Sequence[Heartbeat]) -> str:
    """The precision in which the workers compute what writes."""
    return next((beat.dtype for beat in beats if beat.dtype in BYTES_PER_ELEMENT), "fp32")


def read_licence(directory: Path) -> str:
    """The licence as the model card names it, or as its file begins. Raises ModelRefused."""
    named = None
    card = directory / "README.md"
    if card.is_file():
        head = card.read_text(encoding="utf-8", errors="replace").partition("\n---")[0]
        named = re.search(r"^license(?:_name)?:\s*[\"']?([\w.\- ]+)", head, re.MULTILINE)
    if named is not None:
        licence = named.group(1).strip()
    else:
        files = sorted(directory.glob("LICEN[SC]E*"))
        if not files:
            raise ModelRefused(
                "the checkpoint names no licence (no model card, no LICENSE):"
                " find out which it has and name it yourself with --licence"
            )
        text = files[0].read_text(encoding="utf-8", errors="replace")[:LICENCE_HEAD_BYTES]
        licence = next((line.strip() for line in text.splitlines() if line.strip()), files[0].name)
    words = re.split(r"[\s_\-.]+", licence.lower())
    if any(word in words or word in licence.lower().split() for word in NOT_FOR_HIRE):
        raise ModelRefused(
            f"its licence, {licence}, does not allow to sell what it computes;"
            " if you have another one, name it with --licence"
        )
    return licence


def _fit(footprint: Footprint, dtype: str, beats: Sequence[Heartbeat]) -> str:
    """Whether some worker has the memory for it. Raises ModelRefused when none ever will."""
    total = max((beat.memory_total_bytes for beat in beats), default=0)
    free = max((beat.memory_free_bytes for beat in beats), default=0)
    needed = footprint.weight_bytes + footprint.context_bytes
    size = (
        f"{_millions(footprint.num_parameters)} million parameters,"
        f" {told_bytes(footprint.weight_bytes)} of weights in {dtype},"
        f" {told_bytes(footprint.kv_bytes_per_token)} of KV cache per token"
    )
    if unpacked := footprint.unpacked_notice(dtype):
        size += f"; {unpacked}"
    if not total:
        return f"{size}; no worker says what memory it has"
    if needed > total:
        raise ModelRefused(
            f"it does not fit: {size}, {told_bytes(needed)} with one whole context;"
            f" a worker has {told_bytes(total)}"
        )
    if not footprint.kv_bytes_per_token:
        return f"{size}: an input is computed in one step, and nothing of it is kept"
    has_room = needed <= free
    pool = (free if has_room else total) - footprint.weight_bytes
    length = min(footprint.context_length, SHOWN_TOKENS)
    count = footprint.num_requests(pool, length)
    room = f"{told_bytes(pool)} left hold up to {count:,} requests of {length:,} tokens at once"
    if not has_room:
        room += ", once idle models have been unloaded for it"
    return f"{size}; {room}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count >= 10**7 else f"{count / 1e6:.2g}"
