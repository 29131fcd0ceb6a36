"""What this machine can do, measured when a worker starts: the precision to use, seconds per step.

Takes about three seconds, once: `calibration_cache` remembers. The cost model is fitted to synthetic
steps through the real model: prefills of several lengths, decodes of several batch sizes.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod

import structlog
import torch

from engine.costs.cost_fit import MeasuredStep, fit_roofline, relative_errors
from engine.device.device import Device
from engine.messages import CostModel, StepWork
from engine.models.model import KVBlocks, Model
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library
from kernels.linear import PackedLinear, linear

logger = structlog.get_logger(__name__)

ALONE: AbstractContextManager[None] = nullcontext()
"""Nobody else computes in this process."""
REPETITIONS = 2
LONG_S = 1.0
"""A step that takes longer is not repeated."""
PREFILL_LENS = {"cpu": (16, 64, 128, 512), "cuda": (16, 64, 256, 1024, 2048)}
DECODE_BATCHES = {"cpu": (1, 4, 16, 64), "cuda": (1, 8, 32, 128)}
DECODE_CONTEXTS = {"cpu": ((8, 512), (32, 512)), "cuda": ((16, 1024), (64, 1024))}
"""(batch, context), beside those of one block: they tell what reading keys and values takes."""
WHOLE_BATCHES = ((8, 16), (4, 64), (32, 16))
"""(batch, tokens) of whole prompts, for models that cannot decode without their past: without them
nothing would tell what one more prompt takes from what the step itself does."""
CHUNK = (128, 640)
"""(tokens, context) of a chunk in the middle of a prompt."""
BLOCK_SIZE = 64
READ_BYTES = 256 << 20
"""Well beyond the caches."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A synthetic step: sequences that compute `query_lens` tokens each, up to `context_lens`."""

    query_lens: list[int]
    context_lens: list[int]

    @classmethod
    def prefill(cls, num_tokens: int, context: int) -> "_Step":
        """The last `num_tokens` of one prompt of `context` tokens."""
        return cls([num_tokens], [context])

    @classmethod
    def decode(cls, batch: int, context: int) -> "_Step":
        """One token of each of `batch` sequences."""
        return cls([1] * batch, [context] * batch)

    @property
    def work(self) -> StepWork:
        """As the cost model counts it."""
        pairs = list(zip(self.query_lens, self.context_lens, strict=True))
        return StepWork(
            num_tokens=sum(self.query_lens),
            num_samples=len(pairs),
            prefill_pairs=sum(n * (length - n) + n * n / 2 for n, length in pairs if n > 1),
            decode_context=float(sum(length for n, length in pairs if n == 1)),
        )

    @property
    def has_prefill(self) -> bool:
        return max(self.query_lens) > 1

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // BLOCK_SIZE) for length in self.context_lens)


def choose_dtype(device: torch.device) -> torch.dtype:
    """bf16 where this machine multiplies it faster than fp32, by the very kernels that will run.

    Decode and prefill count alike, each as a ratio: where bf16 is widened first, prefill is a tie
    and decode takes half the time, and a sum of seconds would let noise in the prefill decide.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    seconds = {dtype: _products_s(dtype) for dtype in (torch.bfloat16, torch.float32)}
    return min(seconds, key=lambda dtype: prod(seconds[dtype]))


def fit_cost_model(
    model: Model,
    kv_cache: KVBlocks,
    num_blocks: int,
    *,
    alone: AbstractContextManager[None] = ALONE,
    gpu: Device | None = None,
) -> CostModel:
    """Time synthetic steps in `kv_cache`, whose content is overwritten, and fit their seconds.

    `alone` is entered for each: other models of this process have their turns in between. With a
    `gpu` decodes run as graphs, as they will.
    """
    context_length = model.spec.context_length
    steps = _steps(model.device.type)
    if not model.spec.shares_blocks:
        steps += [_Step([length] * batch, [length] * batch) for batch, length in WHOLE_BATCHES]
    measured = [
        MeasuredStep(step.work, _best_s(_runner(model, kv_cache, step, gpu), alone))
        for step in steps
        if step.num_blocks <= num_blocks and max(step.context_lens) <= context_length
        # where a decode needs the past that its own cache holds, whole prompts must do
        if model.spec.shares_blocks or step.query_lens == step.context_lens
    ]
    with alone:
        weights_s = model.spec.weight_bytes / _read_rate(model.device)
    cost_model = fit_roofline(measured, weights_s)
    logger.info(
        "calibrated",
        ridge_tokens=round(cost_model.ridge_tokens, 1),
        worst_error=round(max(map(abs, relative_errors(cost_model, measured))), 3),
    )
    return cost_model


def warm_up(
    model: Model,
    kv_cache: KVBlocks,
    num_blocks: int,
    *,
    alone: AbstractContextManager[None] = ALONE,
) -> None:
    """One prompt through the model, so that no caller waits for what is compiled at first use."""
    num_tokens = min(BLOCK_SIZE, model.spec.context_length)
    if num_blocks > 0:
        with alone:
            _runner(model, kv_cache, _Step.prefill(num_tokens, num_tokens))()


def _steps(device_type: str) -> list[_Step]:
    steps = [_Step.prefill(length, length) for length in PREFILL_LENS[device_type]]
    steps.append(_Step.prefill(*CHUNK))
    steps += [_Step.decode(batch, BLOCK_SIZE) for batch in DECODE_BATCHES[device_type]]
    return steps + [_Step.decode(*shape) for shape in DECODE_CONTEXTS[device_type]]


def _read_rate(device: torch.device) -> float:
    """Bytes per second of reading memory: by our own loop, or a copy's, which writes as much."""
    memory = torch.ones(READ_BYTES, dtype=torch.uint8, device=device)
    compiled = library.active()
    if device.type == "cpu" and compiled is not None:
        return max(compiled.measure_read(memory) for _ in range(3))
    target = torch.empty_like(memory)

    def copy() -> object:
        target.copy_(memory)
        return target[-1].item()  # waits for the device

    return 2 * READ_BYTES / _best_s(copy)


def _runner(
    model: Model, kv_cache: KVBlocks, step: _Step, gpu: Device | None = None
) -> Callable[[], object]:
    tables: list[list[int]] = []
    next_block = 0
    for length in step.context_lens:
        count = -(-length // BLOCK_SIZE)
        tables.append(list(range(next_block, next_block + count)))
        next_block += count
    metadata = AttentionMetadata.build(
        query_lens=step.query_lens,
        context_lens=step.context_lens,
        block_tables=tables,
        device=model.device,
    )
    token_ids = torch.arange(sum(step.query_lens), device=model.device) % model.spec.vocab_size
    rows = metadata.query_start[1:].long() - 1

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return model.forward(token_ids, kv_cache, metadata, rows).argmax(dim=-1)

    if gpu is None or step.has_prefill:
        return lambda: run().cpu()
    captured = gpu.capture(run)

    def replay() -> object:
        captured.graph.replay()
        return captured.output.cpu()

    return replay


def _best_s(run: Callable[[], object], alone: AbstractContextManager[None] = ALONE) -> float:
    seconds: list[float] = []
    while len(seconds) <= REPETITIONS and sum(seconds) < LONG_S:  # the first one warms up
        with alone:
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
    return min(seconds)


def _products_s(dtype: torch.dtype) -> tuple[float, float]:
    """A few products as decode (1 row) and prefill (128 rows) need them, on fresh weights each."""
    layers = [PackedLinear(torch.ones(2048, 1024, dtype=dtype)) for _ in range(16)]

    def run(num_rows: int) -> Callable[[], object]:
        x = torch.ones(num_rows, 1024, dtype=dtype)
        return lambda: [linear(x, layer) for layer in layers]

    return _best_s(run(1)), _best_s(run(128))
