"""Holds a model beside its original: `generate` of transformers, one prompt at a time.

The same prompts run through our interface as the engine would run them, in one batch: whole, in
chunks across a block's edge, and token by token beside prefills. Their logits are compared row by
row, with the tokens that the original chose.
"""

from dataclasses import dataclass

import torch

from engine.models.model import KVBlocks, Model
from engine.models.original import Original
from engine.models.report import Check
from kernels.attention_metadata import AttentionMetadata

NUM_OUTPUT = 4
RESUME = "resume"
LIMITS = {torch.float32: 1e-3}
LIMIT_OF_ROUNDED = 0.15
"""bf16 keeps 8 bits, and the original rounds in other places than we do: up to 0.054 measured with
SmolLM2-135M. What matters exactly is held in fp32, by `tests/models`."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the original says after one prompt."""

    token_ids: list[int]
    """The prompt, and all but the last of the tokens that followed."""
    logits: torch.Tensor
    """[NUM_OUTPUT, vocab], of the last NUM_OUTPUT positions."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) - NUM_OUTPUT + 1


@dataclass(frozen=True, slots=True)
class _Piece:
    """A few tokens of one reference in one step."""

    reference: Reference
    index: int
    start: int
    end: int
    kind: str

    @property
    def is_compared(self) -> bool:
        """Whether a token follows that the original chose."""
        return self.end >= self.reference.prompt_len


STEPS = (
    ((0, 64, "chunk"), (1, 21, "prefill")),
    ((0, 70, "chunk"), (1, 22, "decode"), (2, 5, "chunk")),
    ((0, 71, "decode"), (1, 23, "decode"), (2, 9, "chunk")),
    ((0, 72, "decode"), (1, 24, "decode"), (2, 10, "decode")),
    ((0, 73, "decode"), (2, 11, "decode")),
    ((2, 12, "decode"), (1, 24, RESUME)),
)
"""(reference, up to which of its tokens, what that is), step by step; prompts of 70, 21 and 9.

`resume` starts over with the output as a part of the prompt, as after a preemption.
"""
KINDS = ("prefill", "chunk", "decode", RESUME)
PROMPT_LENS = (70, 21, 9)


def references(original: Original, vocab_size: int) -> list[Reference]:
    """Greedy continuations by `generate`, with the logits of every choice."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for length in PROMPT_LENS:
        prompt = torch.randint(min(3, vocab_size - 1), vocab_size, (1, length), generator=generator)
        prompt = prompt.to(original.device)
        with torch.inference_mode():
            output = original.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NUM_OUTPUT,
                min_new_tokens=NUM_OUTPUT,
                do_sample=False,
                num_beams=1,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.cat([row.float() for row in output.logits])
        found.append(Reference(output.sequences[0, :-1].tolist(), logits))
    return found


def checks(model: Model, originals: list[Reference], dtype: torch.dtype) -> tuple[Check, ...]:
    """Run the references through the model and compare; one check for each kind of step."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    kv_cache = model.create_kv_cache(2 * len(originals))
    computed = [0] * len(originals)
    for step in STEPS:
        pieces = [
            _Piece(originals[at], at, 0 if kind == RESUME else computed[at], end, kind)
            for at, end, kind in step
        ]
        logits = _run(model, pieces, kv_cache)
        for piece in pieces:
            computed[piece.index] = piece.end
        compared = [piece for piece in pieces if piece.is_compared]
        for row, piece in zip(logits.float(), compared, strict=True):
            expected = piece.reference.logits[piece.end - piece.reference.prompt_len]
            errors[piece.kind].append(_error(row, expected))
    limit = LIMITS.get(dtype, LIMIT_OF_ROUNDED)
    return tuple(Check(kind, max(found), limit) for kind, found in errors.items())


@torch.inference_mode()
def _run(model: Model, pieces: list[_Piece], kv_cache: KVBlocks) -> torch.Tensor:
    """One step; the logits of the pieces that are compared."""
    token_ids = [i for p in pieces for i in p.reference.token_ids[p.start : p.end]]
    metadata = AttentionMetadata.build(
        query_lens=[piece.end - piece.start for piece in pieces],
        context_lens=[piece.end for piece in pieces],
        block_tables=[[2 * piece.index, 2 * piece.index + 1] for piece in pieces],
        device=model.device,
    )
    is_compared = torch.tensor([piece.is_compared for piece in pieces], device=model.device)
    rows = metadata.query_start[1:].long() - 1
    return model.forward(
        torch.tensor(token_ids, device=model.device), kv_cache, metadata, rows[is_compared]
    )


def _error(row: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the expected row's range; NaN when either has one."""
    span = (expected.max() - expected.min()).clamp(min=1e-6)
    return float((row - expected).abs().max() / span)
