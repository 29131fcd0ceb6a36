"""Real engine steps of a real checkpoint, as fractions of limits measured in the same run.

    python -m engine.benchmarks.steps --path var/models/… [--precision int8] [--threads 2]

Prefill of one prompt, and decode of 1, 8 and 64 sequences; then decode of 8 once more beside a
neighbour that takes 30 % of a core. A step here is what the worker runs:
schedule, forward pass, sampling, frames. The limit of a step is its products at the best rate of
any loop here, or its weights at the rate of memory, whichever is longer, and the KV cache read once.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.benchmarks.roofline import PRECISIONS, Limits, Work, machine_limits
from engine.engine import Engine
from engine.messages import GenerateRequest, Sampling
from engine.settings import EngineSettings
from engine.worker.loading import load_engine
from engine.worker.machine import enable_kernels, num_threads
from kernels.cpu.build import AVX2, NATIVE
from kernels.cpu.heap import keep_freed_memory

PROMPT_TOKENS = 256
DECODE_STEPS = 24
DECODE_BATCHES = (1, 8, 64)
NUM_PREFILLS = 8
NEIGHBOUR = """
import time
while True:
    end = time.perf_counter() + 0.003
    while time.perf_counter() < end: pass
    time.sleep(0.007)
"""
"""Takes 30 % of a core, in slices of 3 ms, as another tenant of the machine would."""
BESIDE_NEIGHBOUR = 8
"""Sequences that decode beside it."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--avx2", action="store_true", help="kernels without AVX-512")
    parser.add_argument("--plain-torch", action="store_true", help="without the compiled kernels")
    arguments = parser.parse_args()
    settings = EngineSettings(
        dtype="fp32" if arguments.precision == "fp32" else "bf16",
        quantization="int8" if arguments.precision == "int8" else "none",
        num_threads=arguments.threads,
        is_prefix_cache_on=False,
        is_speculation_on=False,  # a limit is that of one token for each sequence
    )
    target = AVX2 if arguments.avx2 else NATIVE
    built = None if arguments.plain_torch else enable_kernels(settings, target)
    loaded = load_engine(arguments.path, settings)
    keep_freed_memory()
    before = machine_limits(arguments.precision)
    work = Work.of(arguments.path, arguments.precision)
    kernels = "plain torch" if built is None or built.path is None else "compiled kernels"
    rows = list(measure(loaded.engine))
    slower = slower_beside_neighbour(loaded.engine)
    limits = before.best_of(machine_limits(arguments.precision))
    print(
        f"{arguments.precision}, {num_threads(settings)} threads, {kernels}: "
        f"memory {limits.bytes_per_s / 1e9:.1f} GB/s, "
        f"attention {limits.operations_per_s / 1e9:.0f} GFLOP/s, "
        f"products {limits.products_per_s / 1e9:.0f} GOP/s"
    )
    print(f"cost model: {loaded.engine.cost_model}")
    figures = {}
    for name, seconds in rows:
        limit_s = _limit_s(name, work, limits)
        print(f"{name:12} {seconds * 1e3:8.1f} ms {100 * limit_s / seconds:6.1f} % of the limit")
        figures[f"{name.replace(' ', '')}_fraction_{arguments.precision}"] = limit_s / seconds
    print(f"decode {BESIDE_NEIGHBOUR} beside a neighbour at 30 % of a core: {slower:.2f} x as long")
    figures[f"neighbour_step_ratio_{arguments.precision}"] = slower
    print(json.dumps(figures))


def measure(engine: Engine) -> Iterator[tuple[str, float]]:
    """(name, median seconds of a step) of each case."""
    yield "prefill", statistics.median(_prefill_s(engine, seed) for seed in range(NUM_PREFILLS))
    for batch in DECODE_BATCHES:
        yield f"decode {batch}", statistics.median(_decode_steps_s(engine, batch))


def slower_beside_neighbour(engine: Engine) -> float:
    """How many times as long the median decode step is while a neighbour computes."""
    alone = statistics.median(_decode_steps_s(engine, BESIDE_NEIGHBOUR))
    with _neighbour():
        return statistics.median(_decode_steps_s(engine, BESIDE_NEIGHBOUR)) / alone


@contextmanager
def _neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR])  # noqa: S603  (ours, no input)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _limit_s(name: str, work: Work, limits: Limits) -> float:
    if name == "prefill":
        return work.prefill_s(PROMPT_TOKENS, limits)
    batch = int(name.removeprefix("decode "))
    return work.decode_s(batch, PROMPT_TOKENS + DECODE_STEPS // 2, limits)


def _prefill_s(engine: Engine, seed: int) -> float:
    """Seconds until one prompt's first and only token is there; may take several chunks."""
    engine.add(_request(f"prefill-{seed}", seed, num_tokens=1))
    return sum(_run_steps(engine))


def _decode_steps_s(engine: Engine, batch: int) -> list[float]:
    """Seconds of each step in which all sequences decode."""
    for index in range(batch):
        engine.add(_request(f"decode-{batch}-{index}", index, num_tokens=10 * DECODE_STEPS))
    seconds: list[float] = []
    while len(seconds) < DECODE_STEPS:
        before = engine.stats.output_tokens_total
        step_s = sum(engine.step().charges.values())
        if engine.stats.output_tokens_total - before == batch and engine.stats.num_waiting == 0:
            seconds.append(step_s)
    for index in range(batch):
        engine.cancel(f"decode-{batch}-{index}")
    engine.step()
    return seconds[1:]  # the first one may have finished a prefill


def _run_steps(engine: Engine) -> Iterator[float]:
    """The seconds that the engine charges for each step until it has no work."""
    while engine.has_work:
        yield sum(engine.step().charges.values())


def _request(request_id: str, seed: int, num_tokens: int) -> GenerateRequest:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1000, 40_000, (PROMPT_TOKENS,), generator=generator).tolist()
    return GenerateRequest(
        request_id=request_id,
        model="benchmark",
        node="benchmark",
        tenant="benchmark",
        prompt_token_ids=prompt,
        sampling=Sampling(temperature=0.0),
        authorized_tokens=num_tokens,
        max_tokens=num_tokens,
        arrival_ms=0,
        key=0.0,
    )


if __name__ == "__main__":
    main()
