"""What is measured of a gateway. Each cell is one run of some seconds against one process."""

import asyncio
import gc
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.gateway.client import Exchange, Pool, Target
from tests.bench.gateway.words import Words, clock_ms
from tests.bench.peers.processes import tree, tree_cpu_s
from tests.bench.report import percentile

WARM_UP = 200
TOKENS_PER_S = 3.0
"""Of each stream: the rate of the null engines."""
MEBIBYTE = 1024 * 1024
BIG_PROMPT = "The quick brown fox jumps over the lazy dog. " * (MEBIBYTE // 45)


@dataclass(frozen=True, slots=True)
class Served:
    """A running server under test."""

    name: str
    target: Target
    pid: int


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its descendants."""
    total = 0
    for member in tree(pid):
        try:
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except OSError:
            continue  # it has ended
    return total * 4096 / MEBIBYTE


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that come at their own times, whatever the server does."""

    rate: float
    num_answered: int
    num_failed: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    cpu_ms: float
    """Of the server, per request."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """As many requests as are answered, so many at once."""

    concurrency: int
    requests_per_s: float
    num_failed: int
    cpu_ms: float
    p50_ms: float


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """Streams that are opened one after the other and stay open."""

    num_streams: int
    opened_per_s: float
    num_failed: int
    frames_expected: int
    frames_missed: int
    tokens_per_s: float
    """Delivered while all were open."""
    ttft_ms_p50: float
    ttft_ms_p99: float
    delay_ms_p50: float
    delay_ms_p99: float
    delay_ms_max: float
    cpu_cores: float
    """Of the server, while all were open."""
    cpu_us_per_frame: float
    ramp_cpu_cores: float
    rss_mb: float
    rss_mb_before: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest that frames of other streams waited while a prompt of a megabyte was taken in."""

    num_streams: int
    prompt_mb: float
    status: int
    prompt_ms: float
    quiet_delay_ms_max: float
    """Before it came."""
    delay_ms_max: float


Cell = OpenLoop | ClosedLoop | OpenStreams | Stall


async def open_loop(served: Served, words: Words, *, rate: float, seconds: float) -> OpenLoop:
    """Poisson arrivals of streams of one token."""
    pool = Pool(served.target, words)
    await _warm_up(pool, rate, is_streamed=True)
    arrivals = random.Random(7)  # the same times for everybody
    asking: list[asyncio.Task[Exchange]] = []
    cpu_s, start_ms = tree_cpu_s(served.pid), clock_ms() + 50
    due_ms = start_ms
    while due_ms < start_ms + seconds * 1_000:
        await asyncio.sleep(max(0.0, due_ms - clock_ms()) / 1_000)
        asking.append(asyncio.create_task(pool.ask(stream=True, due_ms=due_ms)))
        due_ms += arrivals.expovariate(rate) * 1_000
    exchanges = await _ended(asking, 10.0)
    cpu_s = tree_cpu_s(served.pid) - cpu_s
    pool.close()
    good = [one.ttft_ms for one in exchanges if one.num_frames == 1]
    return OpenLoop(
        rate=rate,
        num_answered=len(good),
        num_failed=len(asking) - len(good),
        ttft_ms_p50=_percentile(good, 0.5),
        ttft_ms_p99=_percentile(good, 0.99),
        cpu_ms=1_000 * cpu_s / len(asking),
    )


async def closed_loop(
    served: Served, words: Words, *, concurrency: int, seconds: float
) -> ClosedLoop:
    """Short answers that are not streamed."""
    pool = Pool(served.target, words)
    await _warm_up(pool, 100, is_streamed=False)
    exchanges: list[Exchange] = []
    cpu_s, started = tree_cpu_s(served.pid), time.monotonic()

    async def ask_on() -> None:
        while time.monotonic() - started < seconds:
            exchanges.append(await pool.ask(stream=False))

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    elapsed_s = time.monotonic() - started
    cpu_s = tree_cpu_s(served.pid) - cpu_s
    pool.close()
    good = [one.ttft_ms for one in exchanges if one.status == 200 and one.num_frames == 1]
    return ClosedLoop(
        concurrency=concurrency,
        requests_per_s=len(good) / elapsed_s,
        num_failed=len(exchanges) - len(good),
        cpu_ms=1_000 * cpu_s / max(1, len(exchanges)),
        p50_ms=_percentile(good, 0.5),
    )


async def open_streams(
    served: Served, words: Words, *, num_streams: int, opened_per_s: float, steady_s: float
) -> OpenStreams:
    """Open streams at a rate; all of them end together, `steady_s` after the last was opened."""
    pool = Pool(served.target, words)
    await _warm_up(pool, 100, is_streamed=True)
    before_mb = resident_mb(served.pid)
    gc.collect()
    gc.freeze()  # this process keeps every frame's time; its collector must not look like a delay
    start_ms = clock_ms() + 50
    full_ms = start_ms + 1_000 * num_streams / opened_per_s
    end_ms = full_ms + 1_000 * steady_s
    asking: list[asyncio.Task[Exchange]] = []
    expected = 0
    ramp_cpu_s = tree_cpu_s(served.pid)
    for position in range(num_streams):
        due_ms = start_ms + 1_000 * position / opened_per_s
        await asyncio.sleep(max(0.0, due_ms - clock_ms()) / 1_000)
        max_tokens = int((end_ms - due_ms) / 1_000 * TOKENS_PER_S) + 1
        expected += max_tokens
        ask = pool.ask(stream=True, max_tokens=max_tokens, due_ms=due_ms)
        asking.append(asyncio.create_task(ask))
    await asyncio.sleep(max(0.0, full_ms - clock_ms()) / 1_000)
    cpu_s = tree_cpu_s(served.pid)
    ramp_cores = 1_000 * (cpu_s - ramp_cpu_s) / (full_ms - start_ms)
    await asyncio.sleep(max(0.0, end_ms - 1_000 - clock_ms()) / 1_000)
    window_s = (end_ms - full_ms) / 1_000 - 1
    cpu_s = tree_cpu_s(served.pid) - cpu_s
    rss_mb = resident_mb(served.pid)
    exchanges = await _ended(asking, 30.0)
    pool.close()
    ttfts = [one.ttft_ms for one in exchanges if one.num_frames]
    delays = [delay for one in exchanges for delay in one.delays_ms]
    steady = sum(full_ms <= at_ms < end_ms - 1_000 for one in exchanges for at_ms in one.frames_ms)
    return OpenStreams(
        num_streams=num_streams,
        opened_per_s=opened_per_s,
        num_failed=num_streams - len(ttfts),
        frames_expected=expected,
        frames_missed=expected - sum(one.num_frames for one in exchanges),
        tokens_per_s=steady / window_s,
        ttft_ms_p50=_percentile(ttfts, 0.5),
        ttft_ms_p99=_percentile(ttfts, 0.99),
        delay_ms_p50=_percentile(delays, 0.5),
        delay_ms_p99=_percentile(delays, 0.99),
        delay_ms_max=max(delays, default=math.inf),
        cpu_cores=cpu_s / window_s,
        cpu_us_per_frame=1e6 * cpu_s / max(1, steady),
        ramp_cpu_cores=ramp_cores,
        rss_mb=rss_mb,
        rss_mb_before=before_mb,
    )


async def stall(served: Served, words: Words, *, num_streams: int) -> Stall:
    """Streams as a clock: each frame says how long it was on its way."""
    pool = Pool(served.target, words)
    await _warm_up(pool, 100, is_streamed=True)
    tokens = int(TOKENS_PER_S * 8)
    streams = [
        asyncio.create_task(pool.ask(stream=True, max_tokens=tokens)) for _ in range(num_streams)
    ]
    await asyncio.sleep(3)
    sent_ms = clock_ms()
    big = await pool.ask(stream=True, max_tokens=1, content=BIG_PROMPT)
    done_ms = clock_ms()
    exchanges = await _ended(streams, 30.0)
    pool.close()
    quiet, loud = [0.0], [0.0]
    for one in exchanges:
        for at_ms, delay_ms in zip(one.frames_ms, one.delays_ms, strict=True):
            if sent_ms <= at_ms <= done_ms + 500:
                loud.append(delay_ms)
            elif sent_ms - 2_000 <= at_ms < sent_ms:
                quiet.append(delay_ms)
    return Stall(
        num_streams=num_streams,
        prompt_mb=len(BIG_PROMPT) / MEBIBYTE,
        status=big.status,
        prompt_ms=done_ms - sent_ms,
        quiet_delay_ms_max=max(quiet),
        delay_ms_max=max(loud),
    )


def as_row(name: str, cell: Cell) -> dict[str, object]:
    """A cell as a line of a table and of the report."""
    return {"gateway": name} | asdict(cell)


def _percentile(values: list[float], fraction: float) -> float:
    """Infinite where nothing was answered: a gateway that is overloaded may be measured, too."""
    return percentile(values, fraction) if values else math.inf


async def _warm_up(pool: Pool, rate: float, *, is_streamed: bool) -> None:
    for _ in range(4):
        await asyncio.gather(*(pool.ask(stream=is_streamed) for _ in range(WARM_UP // 16)))
        await asyncio.sleep(WARM_UP / 16 / rate)


async def _ended(asking: list[asyncio.Task[Exchange]], patience_s: float) -> list[Exchange]:
    """The exchanges that end in time; the others are cut."""
    done, late = await asyncio.wait(asking, timeout=patience_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [task.result() for task in done if task.exception() is None]
