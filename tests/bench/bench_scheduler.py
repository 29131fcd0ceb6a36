"""`make bench-scheduler`: planning, queue, fairness and policies; writes var/bench/scheduler.json.

Parts, which `--only` selects: `plan`, `queue` (Redis), `simulated` (an H100), `speed` (of the
simulator), `fairness` (simulated, a tenant with 10,000 queued), `live_fairness` (the CPU engine, a
tenant with 40), `live` (the CPU engine of the default model at 70, 90 and 110 % of its own capacity on
the mixed trace, in one process: no HTTP, no Redis; with `--ingredients` also without each of ours).
Losses stand beside gains.
"""

import argparse
import asyncio
import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import redis
import redis.asyncio

from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.messages import CostModel
from engine.scheduling.assembly import create_scheduler
from engine.scheduling.planner import plan
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.simulator.bound import mean_ttft_bound_s
from engine.simulator.ledger import RunLedger
from engine.simulator.machines import PRESETS, Machine
from engine.simulator.policies import INGREDIENTS, OURS, POLICIES, Policy
from engine.simulator.report import RunReport, Spread, report
from engine.simulator.simulation import simulate
from engine.simulator.trace import TracedRequest, at_rate
from engine.simulator.workloads import FLOODING_TENANT, chat, flood, mixed, small
from engine.worker.loading import load_engine
from engine.worker.machine import enable_kernels
from tests.bench.live_engine import LiveRun
from tests.bench.platform import ROOT
from tests.bench.report import print_table, write_report
from tests.engine.broker.bench_queue import NUM_QUEUED, PROMPT_TOKENS, fill, redis_us_per_call
from tests.engine.broker.conftest import MODEL
from tests.engine.driver import request
from tests.services import redis_binaries, running_redis

Figures = dict[str, float]
Rows = list[dict[str, Any]]
PARTS = ("plan", "queue", "simulated", "speed", "fairness", "live_fairness", "live")
LIVE_SHARES = (0.7, 0.9, 1.1)
FAIR_OTHERS = 500
"""At 2/s they come while the 10,000 of the flood are still queued."""
LIVE_FAIR_OTHERS, LIVE_FAIR_FLOOD = 10, 40


def bench_plan(_: argparse.Namespace) -> tuple[Figures, Rows]:
    """Real planner and outlook: 512 sequences decode, 256 wait."""
    cost = PRESETS["h100"].cost_model
    settings = PRESETS["h100"].settings
    scheduler = create_scheduler(settings, num_blocks=20_000, context_length=8192, cost_model=cost)
    for index in range(512):
        for sequence in Sequence.all_of(request(f"r{index}", [index] * 200, 400), 0):
            scheduler.add(sequence)
    while scheduler.waiting or scheduler.paused:
        batch = scheduler.schedule(0)
        scheduler.land(batch, scheduler.launch(batch))
        scheduler.append(batch.sample_slots, batch.sample_slots.astype("int64"), 1)
    for index in range(256):
        new = request(f"w{index}", [1000 + index] * 300, 400, key=index / 256)
        for sequence in Sequence.all_of(new, 0):
            scheduler.add(sequence)
    decode_slots = scheduler.slots.is_decoding.nonzero()[0]
    seconds = []
    for _ in range(300):
        started = time.perf_counter()
        _, state = scheduler.look(decode_slots, 1000)
        plan(state, scheduler.limits, cost)
        seconds.append(time.perf_counter() - started)
    microseconds = sorted(seconds)[len(seconds) // 2] * 1e6
    return {"plan_us_512_running": microseconds}, [{"part": "plan", "us p50": microseconds}]


def bench_queue(_: argparse.Namespace) -> tuple[Figures, Rows]:
    """Redis's own time per `take` of one with 10,000 queued, and its memory per queued request."""
    binaries = redis_binaries()
    with running_redis(next(iter(binaries.values()))) as url:
        return asyncio.run(_measure_queue(url))


async def _measure_queue(url: str) -> tuple[Figures, Rows]:
    settings = BrokerSettings(announce_interval_s=5.0)
    client, connection = redis.Redis.from_url(url), redis.asyncio.Redis.from_url(url)
    gateway = GatewayBroker(connection, "node-1", settings=settings)
    worker = WorkerBroker(client, "worker-1", MODEL, settings=settings)
    await gateway.start()
    empty = client.info("memory")["used_memory"]
    await fill(gateway)
    used = (client.info("memory")["used_memory"] - empty) / NUM_QUEUED
    client.config_resetstat()
    for _ in range(200):
        worker.take(1)
    take_us = 2 * redis_us_per_call(client)  # an exchange is two scripts
    await gateway.stop()
    await connection.aclose()
    client.close()
    prompt = len(msgspec.msgpack.encode([40_000 + i for i in range(PROMPT_TOKENS)]))
    figures = {"take_us_10000_queued": take_us, "queued_request_redis_bytes": used - prompt}
    return figures, [{"part": "queue", **figures, "prompt bytes": prompt}]


def bench_simulated(arguments: argparse.Namespace) -> tuple[Figures, Rows]:
    """Our policy and the peers' on a simulated H100 at 90 %, and ours without each ingredient."""
    machine = PRESETS["h100"]
    requests = mixed(1.0, arguments.simulated_requests)
    burst = [replace(each, arrival_s=0.0) for each in requests]
    capacity = report(simulate(burst, machine, OURS)).requests_per_s
    requests = at_rate(requests, 0.9 * capacity)
    bound_s = mean_ttft_bound_s(requests, machine)
    peers = ("ncompass", "vllm", "vllm-tuned", "sglang")
    names = [*peers, *INGREDIENTS.values()]
    found = {name: report(simulate(requests, machine, POLICIES[name])) for name in names}
    ours = found["ncompass"].ttft.mean
    figures = {
        "simulated_h100_capacity_rps": capacity,
        "simulated_h100_gain_90": found["vllm"].ttft.mean / ours,
        "simulated_h100_gain_90_tuned": found["vllm-tuned"].ttft.mean / ours,
    }
    for ingredient, name in INGREDIENTS.items():
        gain = found[name].ttft.mean / ours
        figures[f"simulated_h100_without_{ingredient.replace(' ', '_')}"] = gain
    return figures, [_row(f"simulated h100 90 %, {n}", r, bound_s) for n, r in found.items()]


def bench_fairness(arguments: argparse.Namespace) -> tuple[Figures, Rows]:
    """Simulated: others while a tenant has 10,000 queued, and the same others by themselves."""
    machine = PRESETS["h100"]
    trace = flood(2.0, FAIR_OTHERS)
    flooded = simulate(trace, machine, OURS)
    unfair = report(simulate(trace, machine, replace(OURS, is_fair=False)))
    others = _of_others(trace)
    idle = simulate([trace[index] for index in others], machine, OURS)
    assert flooded.first_s[others].max() < flooded.first_s.max(), "all of them met the flood"
    figures, rows = _fairness(idle, flooded, others, "fair")
    figures["fair_throughput_loss"] = 1 - report(flooded).tokens_per_s / unfair.tokens_per_s
    rows.append(
        {"run": "flooded, one queue", "others p50 ms": unfair.others_ttft.p50 * 1e3}
        | {"others p99 ms": unfair.others_ttft.p99 * 1e3, "tokens/s": unfair.tokens_per_s}
    )
    return figures, rows


def bench_live_fairness(arguments: argparse.Namespace) -> tuple[Figures, Rows]:
    """The same on the real engine with small numbers, and short prompts: no queue while idle."""
    settings = _live_settings()
    trace = [
        replace(each, prompt_tokens=min(each.prompt_tokens, 400))
        for each in small(0.6, LIVE_FAIR_OTHERS, seed=3)
    ]
    flood_at_once = [
        replace(each, arrival_s=0.0, tenant=FLOODING_TENANT)
        for each in small(1.0, LIVE_FAIR_FLOOD, seed=4)
    ]
    trace, both = _of_known_length(trace), _of_known_length([*flood_at_once, *trace])
    idle, _ = _run_live(arguments.model, settings, OURS, trace)
    flooded, _ = _run_live(arguments.model, settings, OURS, both)
    unfair, _ = _run_live(arguments.model, settings, replace(OURS, is_fair=False), both)
    others = _of_others(flooded.requests)
    figures, rows = _fairness(idle, flooded, others, "live_fair")
    figures["live_fair_throughput_loss"] = (
        1 - report(flooded).tokens_per_s / report(unfair).tokens_per_s
    )
    return figures, rows


def _of_known_length(trace: list[TracedRequest]) -> list[TracedRequest]:
    """Requests that say how long their answers will be: a real engine is told where to stop."""
    return [replace(each, max_output_tokens=each.output_tokens) for each in trace]


def _of_others(trace: list[TracedRequest]) -> list[int]:
    return [index for index, each in enumerate(trace) if each.tenant != FLOODING_TENANT]


def _fairness(
    idle: RunLedger, flooded: RunLedger, others: list[int], prefix: str
) -> tuple[Figures, Rows]:
    """Others' TTFT beside a flood, less one (mean) step of the flooded machine, over idle."""
    alone = Spread.of(idle.first_s - idle.arrivals_s)
    beside = Spread.of((flooded.first_s - flooded.arrivals_s)[others])
    step_s = flooded.mean_step_s
    figures = {
        f"{prefix}_ttft_p50_ratio": (beside.p50 - step_s) / alone.p50,
        f"{prefix}_ttft_p99_ratio": (beside.p99 - step_s) / alone.p99,
        f"{prefix}_step_ms": step_s * 1e3,
    }
    rows = [
        {
            "run": name,
            "others p50 ms": ttft.p50 * 1e3,
            "others p99 ms": ttft.p99 * 1e3,
            "tokens/s": report(ledger).tokens_per_s,
        }
        for name, ttft, ledger in (("idle", alone, idle), ("flooded", beside, flooded))
    ]
    return figures, rows


def bench_speed(arguments: argparse.Namespace) -> tuple[Figures, Rows]:
    """How long the simulator takes for many requests on one core."""
    requests = chat(30.0, arguments.speed_requests)
    started_s = time.process_time()
    ledger = simulate(requests, PRESETS["h100"], OURS)
    seconds = time.process_time() - started_s
    figures = {"simulator_cpu_s_per_100000_requests": 1e5 * seconds / len(requests)}
    return figures, [{"part": "speed", "requests": len(requests), "steps": ledger.num_steps}]


def bench_live(arguments: argparse.Namespace) -> tuple[Figures, Rows]:
    """The real engine under our policy and under vLLM's, and what the simulator predicted."""
    settings = _live_settings()
    requests = _of_known_length(small(1.0, arguments.requests))
    burst = [replace(each, arrival_s=0.0) for each in requests]
    ledger, machine = _run_live(arguments.model, settings, OURS, burst)
    ours = report(ledger)
    capacity = ours.requests_per_s
    rows = [_row("live burst (capacity), ncompass", ours)]
    figures: Figures = {"live_capacity_rps": capacity}
    names = ["ncompass", "vllm", *(INGREDIENTS.values() if arguments.ingredients else ())]
    for share in arguments.shares:
        trace = at_rate(requests, share * capacity)
        bound_s = mean_ttft_bound_s(trace, machine)
        found = {
            name: report(_run_live(arguments.model, settings, POLICIES[name], trace)[0])
            for name in names
        }
        predicted = report(simulate(trace, machine, OURS))
        percent = round(100 * share)
        rows += [_row(f"live {percent} %, {name}", each, bound_s) for name, each in found.items()]
        rows.append(_row(f"simulated {percent} %, ncompass", predicted, bound_s))
        ttft = found["ncompass"].ttft
        if share <= 0.75:
            figures["mean_ttft_over_bound_70"] = ttft.mean / bound_s
            figures["simulator_error_p50"] = abs(predicted.ttft.p50 / ttft.p50 - 1)
            figures["simulator_error_p99"] = abs(predicted.ttft.p99 / ttft.p99 - 1)
        else:
            figures |= _gains(found["ncompass"], found["vllm"], percent)
    return figures, rows


def _gains(ours: RunReport, vllm: RunReport, percent: int) -> Figures:
    """Ours beside vLLM's policy; greater is better for us in each."""
    return {
        f"ttft_gain_over_vllm_policy_{percent}": vllm.ttft.mean / ours.ttft.mean,
        f"long_p99_gain_over_vllm_policy_{percent}": (
            vllm.buckets[-1].ttft.p99 / ours.buckets[-1].ttft.p99
        ),
        f"tpot_gain_over_vllm_policy_{percent}": vllm.tpot.p50 / ours.tpot.p50,
        f"itl_p99_gain_over_vllm_policy_{percent}": vllm.gap.p99 / ours.gap.p99,
        f"throughput_gain_over_vllm_policy_{percent}": ours.tokens_per_s / vllm.tokens_per_s,
    }


def _live_settings() -> EngineSettings:
    """Those of a worker on this machine, with the kernels built for it."""
    settings = EngineSettings(kernel_cache=ROOT / "var/kernels")
    enable_kernels(settings)
    return settings


def _run_live(
    model: Path, settings: EngineSettings, policy: Policy, requests: list[TracedRequest]
) -> tuple[RunLedger, Machine]:
    loaded = load_engine(model, settings.model_copy(update={"policy": policy.name}))
    engine = loaded.engine
    cost_model: CostModel | None = engine.cost_model
    assert cost_model is not None
    kv_tokens = engine.stats.total_kv_tokens
    machine = Machine("this CPU", cost_model, kv_tokens, engine.context_length, settings)
    ledger = LiveRun(engine, settings, policy, cost_model, requests).run()
    del loaded, engine
    gc.collect()
    return ledger, machine


def _row(name: str, found: RunReport, bound_s: float | None = None) -> dict[str, Any]:
    longest = found.buckets[-1]
    return {
        "run": name,
        "TTFT mean": found.ttft.mean * 1e3,
        "p50": found.ttft.p50 * 1e3,
        "p99": found.ttft.p99 * 1e3,
        "x bound": found.ttft.mean / bound_s if bound_s else 0.0,
        f"long p99 ({longest.name})": longest.ttft.p99 * 1e3,
        "ITL p99": found.gap.p99 * 1e3,
        "TPOT p50": found.tpot.p50 * 1e3,
        "TPOT p90": found.tpot.p90 * 1e3,
        "tokens/s": found.tokens_per_s,
        "preempted": found.num_preemptions,
    }


def main() -> None:
    """Run the chosen parts; figures of parts that did not run are left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--requests", type=int, default=400, help="of each live run")
    parser.add_argument("--simulated-requests", type=int, default=2000)
    parser.add_argument("--speed-requests", type=int, default=20_000)
    parser.add_argument("--ingredients", action="store_true", help="live runs without each, too")
    parser.add_argument("--shares", type=float, nargs="+", default=LIVE_SHARES)
    default_model = ROOT / "var" / "models" / "HuggingFaceTB--SmolLM2-135M-Instruct"
    parser.add_argument("--model", type=Path, default=default_model)
    parser.add_argument("--output", type=Path, default=Path("var/bench/scheduler.json"))
    arguments = parser.parse_args()
    run = {
        "plan": bench_plan,
        "queue": bench_queue,
        "simulated": bench_simulated,
        "speed": bench_speed,
        "fairness": bench_fairness,
        "live_fairness": bench_live_fairness,
        "live": bench_live,
    }
    figures: Figures = {}
    rows: Rows = []
    for part in arguments.only:
        found, found_rows = run[part](arguments)
        print_table(part, found_rows)
        figures |= found
        rows += found_rows
    print_table("figures", [{"name": name, "value": value} for name, value in figures.items()])
    write_report(arguments.output, figures, rows)


if __name__ == "__main__":
    main()
