"""`make bench-engine`: TTFT and tokens/s over HTTP beside the limits of the same machine.

Serves the default model with the whole platform (API, broker, ledger, one worker) and sends bursts
of 1, 8, 32 and 64 requests, 256 tokens in and 64 out, no prompt sent twice. The limit of each row
is the roofline of this machine measured in the same run: prompts one after the other at the best
rate of any product here, then decode steps of the whole burst at the slower of arithmetic and
memory bandwidth. Before that the steps of the engine alone, and what int8 loses in quality, each in
a process of its own, and what speculation gains and costs (it is off everywhere else).
 Beside them what an idle platform costs, and the worker's memory over two
thousand requests.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from engine.benchmarks.roofline import Limits, Precision, Work, machine_limits
from engine.settings import EngineSettings
from kernels.cpu import library
from tests.bench.load import burst
from tests.bench.platform import START_TIMEOUT_S, BenchPlatform, WorkerFacts, run_platform
from tests.bench.report import percentile, print_table, write_report
from tests.bench.verdict import Target, verdict
from tests.bench.worker_start import worker_start_s

INPUT_TOKENS, OUTPUT_TOKENS = 256, 64
CONCURRENCIES = (1, 8, 32, 64)
PRECISIONS: tuple[Precision, ...] = ("bf16", "int8")
IDLE_S = 20.0
PAUSE_S = 5.0
"""An idle worker brings memory for its KV cache in, and is done with it by then: rounds begin with
memory, and neither its CPU time nor its size is looked at meanwhile."""
ENGINE_TARGETS = (
    *(
        Target(f"{case}_fraction_{precision}", bound, f"{case} of the limit, {precision}", "")
        for precision, bound in (("bf16", 0.85), ("int8", 0.75))
        for case in ("prefill", "decode1", "decode64")
    ),
    Target("burst64_fraction_bf16", 0.8, "burst of 64 over HTTP of the limit, bf16", unit=""),
    Target("burst64_fraction_int8", 0.65, "burst of 64 over HTTP of the limit, int8", unit=""),
    *(
        Target(f"{name}_{precision}", bound, f"{words}, {precision}", unit, is_most=True)
        for precision in PRECISIONS
        for name, bound, words, unit in (
            ("neighbour_step_ratio", 1.4, "step beside a neighbour at 30 % of a core", " x"),
            ("idle_worker_core_share", 0.01, "idle worker's part of a core", ""),
            ("worker_start_s", 5.0, "worker start from its caches", " s"),
        )
    ),
    Target("worker_rss_over_model_mb", 600.0, "memory beside weights and KV", " MB", is_most=True),
    Target("worker_rss_growth_mb_last_1000", 5.0, "growth in 1,000 requests", " MB", is_most=True),
)
MANY_REQUESTS, MANY_AT_ONCE = 2_000, 50
INPUT_SHORT, OUTPUT_SHORT = 32, 8


def request_body(
    model: str,
    generator: random.Random,
    input_tokens: int = INPUT_TOKENS,
    output_tokens: int = OUTPUT_TOKENS,
) -> dict[str, Any]:
    """A prompt of random ids: nothing to share with another request."""
    return {
        "model": model,
        "prompt": [generator.randrange(1000, 40_000) for _ in range(input_tokens)],
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def measure(
    ready: dict[str, Any],
    concurrency: int,
    work: Work,
    limits: Limits,
    generator: random.Random,
) -> dict[str, Any]:
    """One row: the figures of a burst and the share of the limit that they reach."""
    bodies = [request_body(ready["model"], generator) for _ in range(concurrency)]
    completions, seconds = await burst(ready["base_url"], ready["api_key"], bodies)
    tokens = sum(completion.num_tokens for completion in completions)
    prefill_s = work.prefill_s(INPUT_TOKENS, limits)
    decode_s = work.decode_s(concurrency, INPUT_TOKENS + OUTPUT_TOKENS // 2, limits)
    limit_s = work.burst_s(concurrency, INPUT_TOKENS, OUTPUT_TOKENS, limits)
    ttfts = [completion.ttft_s for completion in completions]
    return {
        "requests": concurrency,
        "TTFT p50 ms": percentile(ttfts, 0.5) * 1e3,
        "TTFT p99 ms": percentile(ttfts, 0.99) * 1e3,
        "API's part": statistics.median(1 - c.engine_s / c.ttft_s for c in completions),
        "limit p50 ms": (concurrency + 1) / 2 * prefill_s * 1e3,
        "TPOT p50 ms": percentile([c.tpot_s for c in completions], 0.5) * 1e3,
        "limit TPOT ms": decode_s * 1e3,
        "tokens/s": tokens / seconds,
        "limit tokens/s": tokens / limit_s,
        "of limit": limit_s / seconds,
        "requests/s": concurrency / seconds,
    }


def where_time_goes(platform: BenchPlatform, generator: random.Random) -> list[dict[str, Any]]:
    """CPU seconds of each part during one more burst of 64."""
    before = platform.cpu_seconds()
    bodies = [request_body(platform.ready["model"], generator) for _ in range(64)]
    _, seconds = asyncio.run(burst(platform.ready["base_url"], platform.ready["api_key"], bodies))
    after = platform.cpu_seconds()
    return [
        {
            "part": name,
            "CPU s": after[name] - before[name],
            "of a core": (after[name] - before[name]) / seconds,
        }
        for name in before
    ]


def idle_cost(platform: BenchPlatform) -> dict[str, float]:
    """What each part takes of a core while nobody asks for anything."""
    time.sleep(PAUSE_S)
    before = platform.cpu_seconds()
    time.sleep(IDLE_S)
    after = platform.cpu_seconds()
    return {name: (after[name] - before[name]) / IDLE_S for name in before}


def memory_over_many(platform: BenchPlatform, generator: random.Random) -> list[dict[str, Any]]:
    """The worker's resident size while requests come and go by the thousand."""
    rows = []
    for number in range(MANY_REQUESTS // MANY_AT_ONCE):
        bodies = [
            request_body(platform.ready["model"], generator, INPUT_SHORT, OUTPUT_SHORT)
            for _ in range(MANY_AT_ONCE)
        ]
        asyncio.run(burst(platform.ready["base_url"], platform.ready["api_key"], bodies))
        num_requests = (number + 1) * MANY_AT_ONCE
        if num_requests % (MANY_REQUESTS // 4) == 0:
            time.sleep(PAUSE_S)
            facts = platform.worker_facts()
            rows.append(
                {
                    "after requests": num_requests,
                    "resident, MB": facts.resident_mb,
                    "weights": facts.model_mb,
                    "KV cache": facts.kv_mb,
                    "over both": facts.over_mb,
                }
            )
    return rows


def ask_for_a_form(platform: BenchPlatform) -> None:
    """One structured answer: what it takes to make them is in memory from then on."""
    body = {
        "model": platform.ready["model"],
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": OUTPUT_SHORT,
        "response_format": {"type": "json_object"},
    }
    answer = httpx.post(
        f"{platform.ready['base_url']}/chat/completions",
        headers={"Authorization": f"Bearer {platform.ready['api_key']}"},
        json=body,
        timeout=START_TIMEOUT_S,
    )
    answer.raise_for_status()


def limits_here(facts: WorkerFacts, precision: Precision) -> Limits:
    """This machine's rates now, by the loops of the kernels that the worker runs."""
    built = library.build(EngineSettings().kernel_cache)
    if built.path is not None:
        library.enable(built.path, facts.num_threads)
    try:
        return machine_limits(precision)
    finally:
        library.disable()  # its threads are the worker's rivals


def module_figures(module: str, *arguments: str) -> dict[str, float]:
    """Run a benchmark that prints its figures as JSON in its last line."""
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    print(ran.stdout)
    figures: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def served(
    precision: Precision, num_rounds: int
) -> tuple[list[dict[str, Any]], dict[str, float], Path]:
    """Rows, figures and the model's directory of one platform in one precision."""
    rows: list[dict[str, Any]] = []
    settings = {
        "NCOMPASS_ENGINE_DTYPE": "fp32" if precision == "fp32" else "bf16",
        "NCOMPASS_ENGINE_QUANTIZATION": "int8" if precision == "int8" else "none",
    }
    generator = random.Random(0)  # one for all, so that no prompt is in the prefix cache
    with run_platform(settings) as platform:
        ask_for_a_form(platform)
        idle = idle_cost(platform)
        facts = platform.worker_facts()
        limits = limits_here(facts, precision)
        directory = platform.model_directory.resolve()  # the link goes with the platform
        work = Work.of(directory, precision)
        for concurrency in CONCURRENCIES:
            rounds = []
            for _ in range(num_rounds + 1):
                time.sleep(PAUSE_S)
                row = measure(platform.ready, concurrency, work, limits, generator)
                rounds.append(asyncio.run(row))
            rounds = rounds[1:]  # the first round warms caches and allocators
            rows.append(sorted(rounds, key=lambda row: row["tokens/s"])[len(rounds) // 2])
        time.sleep(PAUSE_S)
        facts = platform.worker_facts()
        profile = where_time_goes(platform, generator)
        memory = memory_over_many(platform, generator) if precision == "bf16" else []
    print_table(
        f"SmolLM2-135M (Q4_1-rounded weights), {precision}, {facts.num_threads} CPU threads, "
        f"{INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out, over HTTP",
        rows,
        f"limits of this run: {limits.products_per_s / 1e9:,.0f} GOP/s in {precision} products, "
        f"{limits.bytes_per_s / 1e9:,.1f} GB/s memory reads; the load generator shares the cores",
    )
    print_table("Where the CPU time of a burst of 64 goes", profile)
    print_table(f"Idle for {IDLE_S:.0f} s: part of a core", [idle])
    figures = figures_of(rows, facts, precision)
    figures[f"idle_worker_core_share_{precision}"] = idle["worker"]
    figures[f"worker_start_s_{precision}"] = worker_start_s(directory, settings)
    print(f"worker start from its caches: {figures[f'worker_start_s_{precision}']:.2f} s")
    if memory:
        print_table("The worker's resident size, its children included", memory)
        figures["worker_rss_growth_mb_last_1000"] = memory[-1]["over both"] - memory[1]["over both"]
    return (
        [row | {"precision": precision} for row in rows + profile],
        figures,
        directory,
    )


def figures_of(
    rows: list[dict[str, Any]], facts: WorkerFacts, precision: Precision
) -> dict[str, float]:
    """The names of DESIGN §8; those that name no precision are of bf16."""
    figures = {
        f"burst64_rps_{precision}": rows[-1]["requests/s"],
        f"burst64_fraction_{precision}": rows[-1]["of limit"],
    }
    if precision == "int8":
        return figures
    figures["worker_rss_over_model_mb"] = facts.over_mb
    for row in rows:
        concurrency = row["requests"]
        figures[f"ttft_ms_p50_c{concurrency}"] = row["TTFT p50 ms"]
        figures[f"tokens_per_s_c{concurrency}"] = row["tokens/s"]
    return figures | {"tpot_ms_p50_c1": rows[0]["TPOT p50 ms"]}


def main() -> None:
    """Run every concurrency `--rounds` times and keep the median round by tokens/s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--output", type=Path, default=Path("var/bench/engine.json"))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    for precision in arguments.precisions:
        found, of_precision, path = served(precision, arguments.rounds)
        rows += found
        figures |= of_precision
        figures |= module_figures(
            "engine.benchmarks.steps", "--path", str(path), "--precision", precision
        )
    figures |= module_figures("engine.benchmarks.speculation", "--path", str(path))
    if "int8" in arguments.precisions:
        figures |= module_figures("engine.benchmarks.quality", "--path", str(path))
    notes = verdict(figures, ENGINE_TARGETS)
    print("\n".join(notes))
    write_report(arguments.output, figures, rows, notes=notes)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
