"""What the static model says of the product's steps on GPUs by their data sheets; runs anywhere."""

from __future__ import annotations

from kernels.benchmarks.chips import CHIPS, Chip, seconds_of
from kernels.benchmarks.launches import (
    AttentionLaunch,
    GatedLaunch,
    Launch,
    LinearLaunch,
    RmsNormLaunch,
    RotaryLaunch,
    SamplingLaunch,
    total_bytes,
    total_operations,
)
from kernels.benchmarks.product_shapes import SHAPES, DecoderShape

STEPS = {
    "decode 1 x 512": ((1,), (512,)),
    "decode 64 x 1024": ((1,) * 64, (1024,) * 64),
    "decode 256 x 1024": ((1,) * 256, (1024,) * 256),
    "prefill 1024": ((1024,), (1024,)),
    "prefill 2048 of 16384": ((2048,), (16384,)),
    "prefill 1024 + decode 64 x 1024": ((1024, *(1,) * 64), (1024, *(1024,) * 64)),
}
"""(new tokens, context) of each sequence."""
KINDS: tuple[tuple[str, type[Launch] | tuple[type[Launch], ...]], ...] = (
    ("products", LinearLaunch),
    ("attention", AttentionLaunch),
    ("elementwise", (RmsNormLaunch, GatedLaunch, RotaryLaunch)),
    ("sampling", SamplingLaunch),
)
NOTICE = (
    "No GPU is here: these are predictions of the static model, from the shapes of each launch and"
    " data sheets.\nThey are lower bounds, and no measurement: nothing below has run on a GPU."
)


def print_predictions() -> None:
    """A table for every shape of model and chip."""
    print(NOTICE)
    for shape in SHAPES:
        for chip in CHIPS.values():
            _print_table(shape, chip)


def _print_table(shape: DecoderShape, chip: Chip) -> None:
    weights = total_bytes([each for each in shape.step((1,), (1,)) if _is_product(each)])
    if weights > chip.memory_bytes:
        return
    rates = f"{chip.bytes_per_s / 1e12:.2f} TB/s, {chip.operations_per_s / 1e12:.0f} TFLOP/s"
    print(f"\n{shape.name}, bf16, one {chip.name} ({rates}); at least, in us of one step:")
    names = "".join(f"{name:>12}" for name, _ in KINDS)
    print(f"{'step':33}{'GB':>8}{'TFLOP':>8}{'step us':>10}{names}")
    for name, (query_lens, contexts) in STEPS.items():
        launches = shape.step(query_lens, contexts)
        step_s = seconds_of(launches, chip.limits())
        parts = "".join(f"{1e6 * _seconds(launches, kind, chip):12.1f}" for _, kind in KINDS)
        print(
            f"{name:33}{total_bytes(launches) / 1e9:8.2f}{total_operations(launches) / 1e12:8.2f}"
            f"{1e6 * step_s:10.1f}{parts}"
        )


def _seconds(
    launches: list[Launch], kind: type[Launch] | tuple[type[Launch], ...], chip: Chip
) -> float:
    return seconds_of([each for each in launches if isinstance(each, kind)], chip.limits())


def _is_product(launch: Launch) -> bool:
    return isinstance(launch, LinearLaunch)
