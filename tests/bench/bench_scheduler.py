"""`make bench-scheduler`: planning, queue, fairness and policies; writes var/bench/scheduler.json.

Parts, which `--only` selects: `plan`, `queue` (Redis), `simulated` (an H100), `fairness` (simulated, a
tenant with 10,000 queued), `live` (the CPU engine of the default model at 70, 90 and 110 % of its own
capacity on the mixed trace, in one process: no HTTP, no Redis). Losses stand beside gains.
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

from engine.assembly import create_scheduler
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.loading import load_engine, num_threads
from engine.messages import CostModel
from engine.planner import plan
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.simulator.bound import mean_ttft_bound_s
from engine.simulator.machines import PRESETS, Machine
from engine.simulator.policies import INGREDIENTS, OURS, POLICIES, Policy
from engine.simulator.report import RunReport, report
from engine.simulator.simulation import simulate
from engine.simulator.trace import TracedRequest, at_rate
from engine.simulator.workloads import FLOODING_TENANT, chat, flood, mixed, small
from kernels.cpu import library
from tests.bench.live_engine import LiveRun
from tests.bench.platform import ROOT
from tests.bench.report import print_table, write_report
from tests.engine.broker.bench_queue import NUM_QUEUED, PROMPT_TOKENS, fill, redis_us_per_call
from tests.engine.broker.conftest import MODEL
from tests.engine.driver import request
from tests.services import redis_binaries, running_redis

Figures = dict[str, float]
Rows = list[dict[str, Any]]
PARTS = ("plan", "queue", "simulated", "fairness", "live")
LIVE_SHARES = (0.7, 0.9, 1.1)


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
        scheduler.advance(batch)
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
    """Simulated: others beside a tenant with 10,000 queued, and the same others by themselves."""
    machine, count = PRESETS["h100"], arguments.simulated_requests
    idle = report(simulate(chat(2.0, count), machine, OURS))
    flooded = report(simulate(flood(2.0, count), machine, OURS))
    one_queue = replace(OURS, is_fair=False)
    unfair = report(simulate(flood(2.0, count), machine, one_queue))
    assert flooded.heaviest_tenant == FLOODING_TENANT
    figures = {
        "fair_ttft_p99_ratio": (flooded.others_ttft.p99 - machine.settings.gap_s) / idle.ttft.p99,
        "fair_throughput_loss": 1 - flooded.tokens_per_s / unfair.tokens_per_s,
    }
    rows = [
        {
            "run": name,
            "others p50 ms": each.others_ttft.p50 * 1e3,
            "others p99 ms": each.others_ttft.p99 * 1e3,
            "tokens/s": each.tokens_per_s,
        }
        for name, each in (("idle", idle), ("flooded", flooded), ("flooded, one queue", unfair))
    ]
    rows[0] |= {"others p50 ms": idle.ttft.p50 * 1e3, "others p99 ms": idle.ttft.p99 * 1e3}
    return figures, rows


def bench_live(arguments: argparse.Namespace) -> tuple[Figures, Rows]:
    """The real engine under our policy and under vLLM's, and what the simulator predicted."""
    settings = EngineSettings()
    built = library.build(ROOT / settings.kernel_cache)
    if built.path is not None:
        library.enable(built.path, num_threads(settings))
    requests = [
        replace(each, max_output_tokens=each.output_tokens)
        for each in small(1.0, arguments.requests)
    ]
    burst = [replace(each, arrival_s=0.0) for each in requests]
    ours, machine = _run_live(arguments.model, settings, OURS, burst)
    capacity = ours.requests_per_s
    rows = [_row("live burst (capacity), ncompass", ours)]
    figures: Figures = {"live_capacity_rps": capacity}
    for share in arguments.shares:
        trace = at_rate(requests, share * capacity)
        bound_s = mean_ttft_bound_s(trace, machine)
        found = {
            name: _run_live(arguments.model, settings, POLICIES[name], trace)[0]
            for name in ("ncompass", "vllm")
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
        elif share <= 1:
            figures["ttft_gain_over_vllm_policy_90"] = found["vllm"].ttft.mean / ttft.mean
    return figures, rows


def _run_live(
    model: Path, settings: EngineSettings, policy: Policy, requests: list[TracedRequest]
) -> tuple[RunReport, Machine]:
    loaded = load_engine(model, settings, policy=policy.plan)
    engine = loaded.engine
    cost_model: CostModel | None = engine.cost_model
    assert cost_model is not None
    kv_tokens = engine.stats.total_kv_tokens
    machine = Machine("this CPU", cost_model, kv_tokens, engine.context_length, settings)
    found = report(LiveRun(engine, settings, policy, cost_model, requests).run())
    del loaded, engine
    gc.collect()
    return found, machine


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
        "tokens/s": found.tokens_per_s,
        "preempted": found.num_preemptions,
    }


def main() -> None:
    """Run the chosen parts; figures of parts that did not run are left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--requests", type=int, default=400, help="of each live run")
    parser.add_argument("--simulated-requests", type=int, default=2000)
    parser.add_argument("--shares", type=float, nargs="+", default=LIVE_SHARES)
    default_model = ROOT / "var" / "models" / "HuggingFaceTB--SmolLM2-135M-Instruct"
    parser.add_argument("--model", type=Path, default=default_model)
    parser.add_argument("--output", type=Path, default=Path("var/bench/scheduler.json"))
    arguments = parser.parse_args()
    run = {
        "plan": bench_plan,
        "queue": bench_queue,
        "simulated": bench_simulated,
        "fairness": bench_fairness,
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
