"""What the queue costs: `python -m tests.engine.broker.bench_queue`.

Prints, for each Redis to be had here: microseconds of Redis per request taken while 10,000 wait (by
`INFO commandstats`, so without the network), the same seen from a worker, the bytes that a waiting
request occupies beyond its prompt, and how many streams a second one gateway carries.
"""

import asyncio
import sys
import time

import msgspec
import redis
import redis.asyncio

from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from tests.engine.broker.conftest import MODEL
from tests.engine.broker.requests import new_frame, new_request, step_of
from tests.services import redis_binaries, running_redis

NUM_QUEUED = 10_000
NUM_TENANTS = 100
PROMPT_TOKENS = 256
NUM_TAKES = 200
NUM_STREAMS = 5_000
NUM_STEPS = 20


def redis_us_per_call(client: redis.Redis) -> float:
    usage = client.info("commandstats")["cmdstat_evalsha"]
    return float(usage["usec"] / usage["calls"])


async def fill(gateway: GatewayBroker) -> None:
    prompt = [40_000 + i for i in range(PROMPT_TOKENS)]
    for start in range(0, NUM_QUEUED, 500):
        requests = (
            new_request(
                f"req_01jd3k8m2x4v6y8z0a2c{i:06d}",
                # Half of all requests are of one tenant, as in the case that fairness is for.
                tenant=f"org_{0 if i % 2 else i % NUM_TENANTS:026d}",
                key=float(i),
                work_s=0.01,
                prompt=prompt,
            )
            for i in range(start, start + 500)
        )
        await asyncio.gather(*(gateway.submit(gateway.prepare(each)) for each in requests))


def measure_takes(client: redis.Redis, worker: WorkerBroker, max_requests: int) -> None:
    client.config_resetstat()
    started = time.perf_counter()
    taken = sum(len(worker.take(max_requests)) for _ in range(NUM_TAKES))
    seen_us = (time.perf_counter() - started) / NUM_TAKES * 1e6
    # An exchange is two scripts: what others want of the worker, and the take.
    inside_us = 2 * redis_us_per_call(client)
    print(
        f"  take({max_requests}): {inside_us:.0f} us in Redis, {seen_us:.0f} us at the worker,"
        f" {inside_us * NUM_TAKES / taken:.1f} us per request"
    )


async def measure_streams(gateway: GatewayBroker, worker: WorkerBroker) -> None:
    requests = [new_request(f"req_{i}") for i in range(NUM_STREAMS)]
    started = time.perf_counter()
    streams = await asyncio.gather(*(gateway.submit(gateway.prepare(each)) for each in requests))
    print(f"  submit: {NUM_STREAMS / (time.perf_counter() - started):.0f} requests/s on one core")
    taken = await asyncio.to_thread(worker.take, NUM_STREAMS)

    def publish() -> None:
        for step in range(NUM_STEPS):
            for start in range(0, NUM_STREAMS, 64):
                frames = [new_frame(each, step, (step,)) for each in taken[start : start + 64]]
                worker.publish({"node-1": step_of(*frames, step=step)})

    async def read(stream: object) -> None:
        for _ in range(NUM_STEPS):
            await anext(stream)  # type: ignore[call-overload]

    started = time.perf_counter()
    reading = asyncio.gather(*map(read, streams))
    await asyncio.to_thread(publish)
    await reading
    rate = NUM_STREAMS * NUM_STEPS / (time.perf_counter() - started)
    print(f"  frames: {rate:.0f} tokens/s to {NUM_STREAMS} streams (worker in the same process)")


async def measure(url: str) -> None:
    settings = BrokerSettings(announce_interval_s=5.0)
    client = redis.Redis.from_url(url)
    connection = redis.asyncio.Redis.from_url(url)
    gateway = GatewayBroker(connection, "node-1", settings=settings)
    worker = WorkerBroker(client, "worker-1", MODEL, settings=settings)
    await gateway.start()
    empty = client.info("memory")["used_memory"]
    await fill(gateway)
    used = (client.info("memory")["used_memory"] - empty) / NUM_QUEUED
    prompt_bytes = len(msgspec.msgpack.encode([40_000 + i for i in range(PROMPT_TOKENS)]))
    print(
        f"redis {client.info('server')['redis_version']}, {NUM_QUEUED} queued, {NUM_TENANTS} tenants"
    )
    print(
        f"  memory: {used:.0f} bytes a request, {used - prompt_bytes:.0f} beyond its prompt's ids"
    )
    for max_requests in (1, 8, 32):
        measure_takes(client, worker, max_requests)
    client.flushall()
    for link in gateway._links.values():
        link.streams.clear()
    await measure_streams(gateway, worker)
    await gateway.stop()
    await connection.aclose()
    client.close()


def main() -> int:
    for binary in redis_binaries().values():
        with running_redis(binary) as url:
            asyncio.run(measure(url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
