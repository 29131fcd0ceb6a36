"""What Python takes between two steps: planning, and everything around the forward pass.

    python -m engine.benchmarks.planning

No model runs: sequences decode made-up tokens, and the cost model is that of a fast GPU, so that a
plan has many chunks to fill its budget with.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from engine.messages import CostModel, GenerateRequest, Sampling
from engine.scheduling.assembly import create_scheduler
from engine.scheduling.outlook import WINDOW
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.settings import EngineSettings

CONTEXT = 300
OUTPUT = 4096
REPEATS = 300
FAST = CostModel(
    base_s=1.2e-3,
    per_token_s=2.5e-5,
    per_prefill_context_s=1.3e-9,
    per_decode_context_s=4.5e-8,
    weights_s=5.5e-3,
    per_sample_s=1e-6,
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    print(f"plan, 512 running, 256 taken     {plan_us():8.0f} us")
    for num_running in (64, 512):
        print(f"whole step, {num_running:4} running      {step_us(num_running):8.0f} us")


def plan_us(num_running: int = 512, num_taken: int = 256) -> float:
    """Median microseconds of one plan, the state that it is made from included."""
    scheduler = filled_scheduler(num_running, num_taken)
    return median_us(lambda: _plan(scheduler))


def step_us(num_running: int) -> float:
    """Median microseconds of a decode step without the model: schedule, advance, append."""
    scheduler = filled_scheduler(num_running, 0)
    return median_us(lambda: _step(scheduler))


def filled_scheduler(num_running: int, num_taken: int) -> Scheduler:
    """`num_running` sequences decode, then `num_taken` requests of mixed lengths arrive."""
    settings = EngineSettings(max_running=num_running + WINDOW, max_step_tokens=8192)
    scheduler = create_scheduler(
        settings, num_blocks=num_running * 32 + 4096, context_length=8192, cost_model=FAST
    )
    draw = random.Random(1)  # noqa: S311  # a fixed load, not a secret
    for index in range(num_running):
        scheduler.add(_sequence(f"running-{index}", CONTEXT, draw))
    while scheduler.waiting or scheduler.paused:
        _step(scheduler)
    for index in range(num_taken):
        scheduler.add(_sequence(f"taken-{index}", draw.randrange(50, 900), draw))
    return scheduler


def median_us(call: Callable[[], object]) -> float:
    """Of REPEATS calls after a few warm ones."""
    seconds = []
    for _ in range(REPEATS + 20):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 1e6 * statistics.median(seconds[20:])


def _plan(scheduler: Scheduler) -> object:
    """The part of `Scheduler.schedule` that decides, without what carries it out."""
    decode_slots = np.flatnonzero(scheduler.slots.is_decoding)
    _, state = scheduler.look(decode_slots, _now_us())
    return scheduler.policy(state, scheduler.limits, scheduler.cost_model)


def _step(scheduler: Scheduler) -> None:
    batch = scheduler.schedule(_now_us())
    scheduler.land(batch, scheduler.launch(batch))
    tokens = np.ones(len(batch.sample_slots), dtype=np.int64)
    scheduler.append(batch.sample_slots, tokens, _now_us())


def _now_us() -> int:
    return time.perf_counter_ns() // 1_000


def _sequence(name: str, num_tokens: int, draw: random.Random) -> Sequence:
    request = GenerateRequest(
        request_id=name,
        model="benchmark",
        node="benchmark",
        tenant=f"tenant-{draw.randrange(20)}",
        prompt_token_ids=[draw.randrange(5000) for _ in range(num_tokens)],
        sampling=Sampling(),
        authorized_tokens=OUTPUT,
        max_tokens=OUTPUT,
        arrival_ms=0,
        key=FAST.work_s(num_tokens),
    )
    (sequence,) = Sequence.all_of(request, _now_us())
    return sequence


if __name__ == "__main__":
    main()
