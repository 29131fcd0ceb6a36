"""Gateway and worker against real Redis servers: a request's walk, what is told of it, the limits."""

import asyncio

import pytest
import redis

from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings
from engine.errors import ModelUnavailable, RequestLost
from engine.messages import TokenFrame
from tests.engine.broker.conftest import MODEL, SETTINGS, Gateways, Workers
from tests.engine.broker.requests import new_frame, new_request, step_of
from tests.engine.broker.walking import KEYS, eventually, expire_lease, new_heartbeat, started, take


async def test_a_request_walks_to_a_worker_and_its_tokens_walk_back(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    assert await take(worker) == [request]
    worker.publish({"node-1": step_of(new_frame(request, 0, (7,)))})
    worker.publish({"node-1": step_of(new_frame(request, 1, (8, 9), finish_reason="stop"))})
    frames = [frame async for frame in stream]
    assert [frame.token_ids for frame in frames] == [(7,), (8, 9)]
    assert frames[-1].finish_reason == "stop"
    assert stream.emitted_token_ids == [[7, 8, 9]]
    assert gateway.num_streams == 0


async def test_a_finished_request_leaves_nothing_in_redis(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    last = step_of(new_frame(request, 0, (7,), finish_reason="length"))
    worker.exchange(frames_by_node={"node-1": last}, finished=[request.request_id])
    assert [frame.token_ids async for frame in stream] == [(7,)]
    left = {key.decode().removeprefix(KEYS.prefix) for key in client.keys("*")}
    assert left <= {"born", "nodes", "idle", "last", "taken", "frames:node-1", "swept"}
    assert worker.held == []


async def test_a_sink_that_fails_ends_its_own_stream_and_the_others_go_on(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    streams = [await gateway.submit(gateway.prepare(new_request(f"req_{i}"))) for i in range(2)]
    requests = await take(worker)

    def fail(frame: TokenFrame) -> bool:
        raise RuntimeError("the handler is closed")

    streams[0].sink = fail
    reading = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    frames = [new_frame(request, 0, (5,)) for request in requests]
    worker.publish({"node-1": step_of(*frames)})
    with pytest.raises(RuntimeError, match="the handler is closed"):
        await asyncio.wait_for(reading[0], 2.0)
    assert (await asyncio.wait_for(reading[1], 2.0)).token_ids == (5,)
    assert streams[0].is_closed
    assert gateway.num_streams == 1
    worker.publish({"node-1": step_of(new_frame(requests[1], 1, (6,)))})
    assert (await asyncio.wait_for(anext(streams[1]), 2.0)).token_ids == (6,)


async def test_frames_of_other_requests_leave_although_one_was_refused(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    lost, kept = new_request("req_lost"), new_request("req_kept")
    await gateway.submit(gateway.prepare(lost))
    stream = await gateway.submit(gateway.prepare(kept))
    await take(worker)
    expire_lease(client, lost)
    await eventually(lambda: client.exists(KEYS.queue("org_1")))
    frames = step_of(new_frame(lost, 0, (1,)), new_frame(kept, 0, (2,), finish_reason="stop"))
    assert worker.publish({"node-1": frames}) == {"req_lost": 1}
    assert [frame.token_ids async for frame in stream] == [(2,)]


async def test_every_choice_ends_by_itself(new_gateway: Gateways, new_worker: Workers) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request(num_choices=2)
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    worker.publish(
        {
            "node-1": step_of(
                new_frame(request, 0, (1,), finish_reason="stop"),
                new_frame(request, 0, (2,), choice=1),
                new_frame(request, 1, (3,), choice=1, finish_reason="length"),
            )
        }
    )
    frames = [frame async for frame in stream]
    assert [(frame.choice, frame.token_ids) for frame in frames] == [
        (0, (1,)),
        (1, (2,)),
        (1, (3,)),
    ]


async def test_positions_count_the_turns_of_the_other_tenants(new_gateway: Gateways) -> None:
    gateway = await started(new_gateway)
    requests = [new_request(f"req_a{i}", tenant="a", key=float(i)) for i in range(5)]
    requests += [new_request(f"req_b{i}", tenant="b", key=float(i)) for i in range(2)]
    for request in requests:
        await gateway.submit(gateway.prepare(request))
    await asyncio.sleep(0.2)  # a place may be as old as one announcement
    first, last = await gateway.position(requests[0]), await gateway.position(requests[4])
    assert (first.position, first.num_own_ahead) == (1, 0)
    assert (last.position, last.num_own_ahead, last.num_others_ahead) == (6, 4, 2)
    assert (last.num_waiting, last.num_tenants, last.eta_ms) == (7, 2, None)


async def test_an_expected_wait_follows_from_the_pace_of_the_queue(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    requests = [new_request(f"req_{i}", key=float(i)) for i in range(40)]
    for request in requests:
        await gateway.submit(gateway.prepare(request))
    for _ in range(10):
        await take(worker, 1)
        await asyncio.sleep(0.05)
    position = await gateway.position(requests[-1])
    assert position.eta_ms is not None
    assert 300 < position.eta_ms < 30_000  # 30 left, taken at up to 20 a second


async def test_heartbeats_are_read_by_model_and_altogether(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway = await started(new_gateway)
    assert await gateway.heartbeats(MODEL) == []
    for name in ("w1", "w2"):
        new_worker(name).heartbeat(new_heartbeat(name))
    assert {word.worker for word in await gateway.heartbeats(MODEL)} == {"w1", "w2"}
    assert {word.worker for word in await gateway.heartbeats(None)} == {"w1", "w2"}
    assert await gateway.heartbeats("another") == []


async def test_a_silent_worker_disappears(new_gateway: Gateways, new_worker: Workers) -> None:
    settings = SETTINGS.model_copy(update={"worker_ms": 50})
    gateway = new_gateway("node-1", settings)
    await gateway.start()
    new_worker("w1", settings).heartbeat(new_heartbeat("w1"))
    await asyncio.sleep(0.1)
    assert await gateway.heartbeats(MODEL) == []


async def test_a_redis_that_forgot_the_scripts_gets_them_again(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    await gateway.submit(gateway.prepare(new_request("req_1")))
    client.script_flush()
    await gateway.submit(gateway.prepare(new_request("req_2")))
    client.script_flush()
    assert len(await take(worker)) == 2


async def test_an_unreachable_queue_is_our_fault_and_said_in_time() -> None:
    import redis.asyncio

    connection = redis.asyncio.Redis.from_url("redis://127.0.0.1:1/0")
    settings = BrokerSettings(patience_s=0.3)
    gateway = GatewayBroker(connection, "node-1", settings=settings)
    await gateway.start()
    with pytest.raises(ModelUnavailable):
        await asyncio.wait_for(gateway.submit(gateway.prepare(new_request())), 5)
    assert gateway.num_streams == 0
    await gateway.stop()
    await connection.aclose()


async def test_a_full_redis_is_our_fault(new_gateway: Gateways, client: redis.Redis) -> None:
    gateway = await started(new_gateway)
    await gateway.submit(gateway.prepare(new_request("req_1")))
    client.config_set("maxmemory", "1")
    try:
        with pytest.raises(ModelUnavailable):
            await gateway.submit(gateway.prepare(new_request("req_2")))
    finally:
        client.config_set("maxmemory", "0")


async def test_a_node_has_a_limit_of_streams(new_gateway: Gateways) -> None:
    gateway = new_gateway("node-1", SETTINGS.model_copy(update={"streams_limit": 2}))
    await gateway.start()
    for i in range(2):
        await gateway.submit(gateway.prepare(new_request(f"req_{i}")))
    with pytest.raises(ModelUnavailable):
        await gateway.submit(gateway.prepare(new_request("req_2")))


async def test_a_stopping_gateway_ends_its_streams(new_gateway: Gateways) -> None:
    gateway = await started(new_gateway)
    stream = await gateway.submit(gateway.prepare(new_request()))
    await gateway.stop()
    with pytest.raises(RequestLost):
        await anext(stream)


async def test_a_thousand_streams_share_three_connections(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    requests = [new_request(f"req_{i}", tenant=f"org_{i % 50}") for i in range(1000)]
    streams = await asyncio.gather(
        *(gateway.submit(gateway.prepare(request)) for request in requests)
    )
    taken = await take(worker, 2000)
    assert len(taken) == 1000
    for step in range(3):
        reason = "length" if step == 2 else None
        frames = [new_frame(request, step, (step,), finish_reason=reason) for request in taken]
        worker.exchange(frames_by_node={"node-1": step_of(*frames, step=step)})

    async def read(stream: object) -> list[int]:
        return [token async for frame in stream for token in frame.token_ids]  # type: ignore[attr-defined]

    assert await asyncio.gather(*map(read, streams)) == [[0, 1, 2]] * 1000
    assert len(client.client_list()) <= 5
