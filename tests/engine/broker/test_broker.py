"""Gateway and worker against real Redis servers: one request's walk, and everything that can die."""

import asyncio
import time

import pytest
import redis

from engine.broker.gateway import GatewayBroker
from engine.broker.keys import Keys
from engine.broker.settings import BrokerSettings
from engine.broker.worker import WorkerBroker
from engine.errors import ModelUnavailable, RequestLost
from engine.messages import (
    Cancel,
    CheckIntegrity,
    EndChoice,
    Extend,
    GenerateRequest,
    Heartbeat,
    TokenFrame,
)
from tests.engine.broker.conftest import MODEL, SETTINGS, Gateways, Workers
from tests.engine.broker.requests import new_frame, new_request, step_of

KEYS = Keys(MODEL)


async def eventually(claim: object, timeout_s: float = 5.0) -> None:
    """Wait until `claim()` holds."""
    assert callable(claim)
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        await asyncio.sleep(0.01)


def expire_lease(client: redis.Redis, request: GenerateRequest) -> None:
    client.zadd(KEYS.prefix + "lease", {request.request_id: 0})
    client.delete(KEYS.prefix + "swept")


def new_heartbeat(worker: str = "worker-1") -> Heartbeat:
    return Heartbeat(
        worker=worker,
        model=MODEL,
        revision="r",
        state="ready",
        sent_ms=1,
        pid=1,
        dtype="fp32",
        context_length=64,
    )


async def started(new_gateway: Gateways, node: str = "node-1") -> GatewayBroker:
    gateway = new_gateway(node)
    await gateway.start()
    return gateway


async def take(worker: WorkerBroker, count: int = 8) -> list[GenerateRequest]:
    return await asyncio.to_thread(worker.take, count)


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


async def test_submitting_twice_queues_once(new_gateway: Gateways, new_worker: Workers) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    await gateway.submit(gateway.prepare(request))
    await gateway.submit(gateway.prepare(request))
    assert await take(worker) == [request]
    await gateway.submit(gateway.prepare(request))
    assert await take(worker) == []


async def test_a_fence_reaches_whoever_runs_the_request_or_will(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    stream = await gateway.submit(gateway.prepare(new_request()))
    stream.authorize(5)
    await gateway.extend(stream.request)
    [taken] = await take(worker)
    assert taken.authorized_tokens == 5, "while it was queued"
    stream.authorize(8)
    for _ in range(2):
        await gateway.extend(stream.request)
    said = Extend(request_id=taken.request_id, authorized_tokens=8)
    assert await asyncio.to_thread(worker.control) == [said, said]

    # Its worker dies before the first frame, and the next one knows the fence.
    client.zadd(KEYS.prefix + "lease", {taken.request_id: 0})
    other = new_worker("worker-2")
    await eventually(lambda: client.zcard(KEYS.prefix + "lease") == 0)
    [again] = await take(other)
    assert (again.attempt, again.authorized_tokens) == (2, 8)


async def test_an_extension_of_what_nobody_knows_changes_nothing(new_gateway: Gateways) -> None:
    gateway = await started(new_gateway)
    await gateway.extend(new_request())
    assert gateway.num_streams == 0


async def test_a_cancelled_request_leaves_the_queue(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    stream = await gateway.submit(gateway.prepare(new_request()))
    await stream.cancel()
    await stream.cancel()
    assert await take(worker) == []
    assert client.keys("*:r:*") == []


async def test_a_running_request_is_cancelled_through_its_worker(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    await stream.cancel()
    await gateway.cancel(request)
    assert worker.control() == [Cancel(request.request_id, attempt=1)]
    assert worker.control() == []


async def test_a_choice_is_ended_at_the_worker_and_its_last_tokens_are_dropped(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request(num_choices=2)
    stream = await gateway.submit(gateway.prepare(request))
    await gateway.end_choice(request, 1)
    assert worker.control() == [], "nobody runs it"
    await take(worker)
    await gateway.end_choice(request, 0)
    assert worker.control() == [EndChoice(request.request_id, choice=0)]
    late, last = new_frame(request, 0, (5,), choice=0), new_frame(request, 0, (6,), choice=1)
    assert stream.receive(late, "worker-1")
    assert stream.receive(last, "worker-1")
    assert not stream.has_frames
    assert stream.is_closed
    await gateway.end_choice(new_request("req_unknown"), 0)


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


async def test_a_waiting_worker_wakes_for_a_request_and_for_a_message(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    assert not await asyncio.to_thread(worker.wait, 0.05)
    sleeping = asyncio.create_task(asyncio.to_thread(worker.wait, 2.0))
    await asyncio.sleep(0.05)
    await gateway.submit(gateway.prepare(new_request()))
    assert await asyncio.wait_for(sleeping, 1.0)
    assert len(await take(worker)) == 1
    sleeping = asyncio.create_task(asyncio.to_thread(worker.wait, 2.0))
    await asyncio.sleep(0.05)
    await gateway.tell(MODEL, "worker-1", CheckIntegrity(token="t"))
    assert await asyncio.wait_for(sleeping, 1.0)
    assert worker.control() == [CheckIntegrity(token="t")]


async def test_a_worker_with_room_only_for_newcomers_sleeps_until_one_comes(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    for i in range(3):
        await gateway.submit(gateway.prepare(new_request(f"req_a{i}", tenant="a")))
    assert len(await asyncio.to_thread(worker.take, 1, 1, ())) == 1

    def sleep(timeout_s: float) -> bool:
        return worker.wait(timeout_s, for_newcomers=True)

    assert not await asyncio.to_thread(sleep, 0.05), "what is queued of `a` wakes nobody"
    await gateway.submit(gateway.prepare(new_request("req_a3", tenant="a")))
    assert not await asyncio.to_thread(sleep, 0.05)
    sleeping = asyncio.create_task(asyncio.to_thread(sleep, 2.0))
    await asyncio.sleep(0.05)
    await gateway.submit(gateway.prepare(new_request("req_b", tenant="b")))
    assert await asyncio.wait_for(sleeping, 1.0)
    taken = await asyncio.to_thread(worker.take, 0, 1, ["a"])
    assert [request.request_id for request in taken] == ["req_b"]


async def test_no_wake_up_is_lost_while_requests_are_left(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, first, second = await started(new_gateway), new_worker("w1"), new_worker("w2")
    for i in range(100):
        await gateway.submit(gateway.prepare(new_request(f"req_{i}")))
    taken = 0
    while await asyncio.to_thread(first.wait, 0.05):
        # However few it takes, the other worker is always woken for the rest.
        taken += len(await take(first, 1))
        if taken < 100:
            assert await asyncio.to_thread(second.wait, 0.05)
            taken += len(await take(second, 1))
    assert taken == 100


async def test_the_least_served_tenant_goes_first_and_its_least_key(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    for i in range(6):
        request = new_request(f"req_a{i}", tenant="a", key=float(-i), work_s=1.0)
        await gateway.submit(gateway.prepare(request))
    for i in range(2):
        request = new_request(f"req_b{i}", tenant="b", key=float(i), work_s=1.0)
        await gateway.submit(gateway.prepare(request))
    taken = [request.request_id for request in await take(worker, 5)]
    assert taken == ["req_a5", "req_b0", "req_a4", "req_b1", "req_a3"]


async def test_spare_room_is_for_tenants_that_have_nothing_waiting_in_the_worker(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    for tenant in ("a", "b", "c"):
        for i in range(3):
            request = new_request(f"req_{tenant}{i}", tenant=tenant, key=float(i), work_s=1.0)
            await gateway.submit(gateway.prepare(request))
    spare = await asyncio.to_thread(worker.take, 0, 4, ["a"])
    assert [request.request_id for request in spare] == ["req_b0", "req_c0"], "one each"
    both = await asyncio.to_thread(worker.take, 1, 1, ["b"])
    assert [request.request_id for request in both] == ["req_a0", "req_c1"]


async def test_weights_share_the_machine_in_proportion(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    for i in range(40):
        for tenant, weight in (("light", 1.0), ("heavy", 3.0)):
            await gateway.submit(
                gateway.prepare(
                    new_request(f"req_{tenant}{i}", tenant=tenant, weight=weight, key=float(i))
                )
            )
    taken: list[str] = []
    for _ in range(40):
        [request] = await take(worker, 1)
        taken.append(request.tenant)
        worker.exchange(charges={request.tenant: 0.5}, finished=[request.request_id])
    assert 29 <= taken.count("heavy") <= 31


async def test_time_away_earns_a_tenant_nothing(new_gateway: Gateways, new_worker: Workers) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    for i in range(30):
        await gateway.submit(gateway.prepare(new_request(f"req_a{i}", tenant="a")))
    for _ in range(10):
        [request] = await take(worker, 1)
        worker.exchange(charges={"a": 1.0}, finished=[request.request_id])
    for i in range(30):
        await gateway.submit(gateway.prepare(new_request(f"req_b{i}", tenant="b")))
    tenants = []
    for _ in range(20):
        [request] = await take(worker, 1)
        tenants.append(request.tenant)
        worker.exchange(charges={request.tenant: 1.0}, finished=[request.request_id])
    assert tenants.count("b") == 10


async def test_a_request_of_a_dead_worker_goes_to_another_if_it_has_said_nothing(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, dying, other = await started(new_gateway), new_worker("dying"), new_worker("other")
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(dying)
    expire_lease(client, request)
    await eventually(lambda: client.exists(KEYS.queue("org_1")))
    [again] = await take(other)
    assert again.attempt == 2
    assert again.prompt_token_ids == request.prompt_token_ids
    # The first worker was only asleep: nothing that it says is heard.
    assert dying.publish({"node-1": step_of(new_frame(request, 0, (1,)))}) == {"req_1": 1}
    other.publish({"node-1": step_of(new_frame(again, 0, (2,), finish_reason="stop"))})
    assert [frame.token_ids async for frame in stream] == [(2,)]


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


async def test_a_stream_whose_worker_died_goes_on_from_another_behind_what_it_had(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, dying, other = await started(new_gateway), new_worker("dying"), new_worker("other")
    request = new_request(num_choices=3)
    stream = await gateway.submit(gateway.prepare(request))
    await take(dying)
    said = [
        new_frame(request, 0, (5, 6)),
        new_frame(request, 0, (9,), choice=2, finish_reason="stop"),
    ]
    dying.publish({"node-1": step_of(*said, worker="dying")})
    assert [await anext(stream), await anext(stream)] == said
    assert (stream.worker, stream.is_running) == ("dying", True)
    expire_lease(client, request)
    await eventually(lambda: client.exists(KEYS.queue("org_1")))
    assert not stream.is_running
    [again] = await take(other)
    assert (again.attempt, again.emitted_token_ids) == (2, ((5, 6), (), (9,)))
    assert again.ended_choices == (2,)
    # The first worker was only asleep: it is told so, and nothing that it says is heard.
    assert dying.renew([request.request_id]) == {"req_1": 1}
    dying.publish({"node-1": step_of(new_frame(request, 2, (99,)), worker="dying")})
    last = [
        new_frame(again, 2, (7,), finish_reason="stop"),
        new_frame(again, 0, (8,), choice=1, finish_reason="stop"),
    ]
    other.exchange(frames_by_node={"node-1": step_of(*last, worker="other")}, finished=other.held)
    assert [frame async for frame in stream] == last
    assert stream.emitted_token_ids == [[5, 6, 7], [8], [9]]
    assert (stream.worker, stream.request.attempt) == ("other", 2)
    assert client.keys("*:r:*") == []


async def test_a_stream_is_given_up_after_three_workers_that_died_in_the_middle(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    for attempt in (1, 2, 3):
        await eventually(lambda: client.exists(KEYS.queue("org_1")))
        [taken] = await take(worker)
        assert taken.attempt == attempt
        worker.publish({"node-1": step_of(new_frame(taken, attempt - 1, (attempt,)))})
        assert (await anext(stream)).token_ids == (attempt,)
        expire_lease(client, request)
    with pytest.raises(RequestLost, match="at attempt 3"):
        await asyncio.wait_for(anext(stream), 5)
    assert client.keys("*:r:*") == []
    assert gateway.num_streams == 0


async def test_a_resubmitted_request_that_is_lost_before_it_speaks_stays_in_the_queue(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    worker.publish({"node-1": step_of(new_frame(request, 0, (5,)))})
    for attempt in (2, 3):
        expire_lease(client, request)
        await eventually(lambda: client.exists(KEYS.queue("org_1")))
        [taken] = await take(worker)
        assert (taken.attempt, taken.emitted_token_ids) == (attempt, ((5,),))
    worker.publish({"node-1": step_of(new_frame(taken, 1, (6,), finish_reason="stop"))})
    assert [frame.token_ids async for frame in stream] == [(5,), (6,)]


async def test_a_poison_request_stops_after_three_workers(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    for attempt in (1, 2, 3):
        await eventually(lambda: client.exists(KEYS.queue("org_1")))
        [taken] = await take(worker)
        assert taken.attempt == attempt
        expire_lease(client, request)
    frames = [frame async for frame in stream]
    assert [(frame.finish_reason, frame.error) for frame in frames] == [
        ("error", "too_many_attempts")
    ]
    assert client.keys("*:r:*") == []


async def test_a_draining_worker_returns_requests_without_counting_an_attempt(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request, running = new_request("req_waiting"), new_request("req_running")
    await gateway.submit(gateway.prepare(request))
    await gateway.submit(gateway.prepare(running))
    await take(worker)
    worker.publish({"node-1": step_of(new_frame(running, 0, (1,)))})
    worker.give_back(worker.held)
    await eventually(lambda: client.zcard(KEYS.queue("org_1")) == 2)
    taken = {new.request_id: new for new in await take(new_worker("other"))}
    assert taken["req_waiting"].attempt == 1
    # What had begun to speak goes on by its gateway, which knows what was said.
    assert taken["req_running"].attempt == 2
    assert taken["req_running"].emitted_token_ids == ((1,),)


async def test_requests_of_a_dead_node_are_dropped_and_stopped(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    running, waiting = new_request("req_running", key=0.0), new_request("req_waiting")
    await gateway.submit(gateway.prepare(running))
    await gateway.submit(gateway.prepare(waiting))
    await take(worker, 1)
    await gateway.stop()
    client.delete(KEYS.prefix + "swept")
    client.set(KEYS.born, 1)
    worker.heartbeat(new_heartbeat())
    assert worker.control() == [Cancel("req_running", attempt=1)]
    assert await take(worker) == []
    assert worker.dead_nodes(["node-1"]) == {"node-1"}
    worker.finish(["req_running"])
    assert client.keys("*:r:*") == []


async def test_a_node_is_not_dead_because_redis_forgot_it(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    worker = new_worker()
    assert worker.dead_nodes(["node-1"]) == set()
    client.set(KEYS.born, 1)
    assert worker.dead_nodes(["node-1"]) == {"node-1"}
    gateway = await started(new_gateway)
    await gateway.submit(gateway.prepare(new_request()))
    assert worker.dead_nodes(["node-1", "node-2"]) == {"node-2"}


@pytest.mark.parametrize(
    ("first_index", "token_ids"), [(2, (3,)), (0, (8, 2))], ids=["missing", "contradicting"]
)
async def test_frames_that_do_not_continue_the_stream_are_had_again(
    new_gateway: Gateways, new_worker: Workers, first_index: int, token_ids: tuple[int, ...]
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    frames = [new_frame(request, 0, (1,)), new_frame(request, first_index, token_ids)]
    worker.publish({"node-1": step_of(*frames)})
    async with asyncio.timeout(5):
        while not (taken := await take(worker)):
            await asyncio.sleep(0.01)
    [again] = taken
    assert (again.attempt, again.emitted_token_ids) == (2, ((1,),))
    worker.publish({"node-1": step_of(new_frame(again, 1, (2,), finish_reason="stop"))})
    assert [frame.token_ids async for frame in stream] == [(1,), (2,)]


async def test_a_replaced_attempt_is_told_to_stop(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    await gateway.submit(gateway.prepare(request))
    await take(worker)
    worker.publish({"node-1": step_of(new_frame(request, 1, (2,)))})
    control: list[object] = []
    async with asyncio.timeout(5):
        while not control:
            control = list(await asyncio.to_thread(worker.control))
    assert control == [Cancel("req_1", attempt=1)]


async def test_an_attempt_from_the_beginning_is_heard_from_where_the_last_one_stopped(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    worker.publish({"node-1": step_of(new_frame(request, 0, (1, 2)))})
    # As after a wipe in which the worker did not learn that its first frame had left.
    again = new_request(attempt=2)
    worker.publish({"node-1": step_of(new_frame(again, 0, (1, 2, 3)))})
    worker.publish({"node-1": step_of(new_frame(again, 3, (4,), finish_reason="stop"))})
    assert [frame.token_ids async for frame in stream] == [(1, 2), (3,), (4,)]


async def test_a_repeated_message_is_heard_once(new_gateway: Gateways, new_worker: Workers) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    for _ in range(2):
        worker.publish({"node-1": step_of(new_frame(request, 0, (1, 2)))})
    worker.publish({"node-1": step_of(new_frame(request, 2, (3,), finish_reason="length"))})
    assert [frame.token_ids async for frame in stream] == [(1, 2), (3,)]


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


async def test_running_work_survives_a_wiped_redis(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    talking, silent = new_request("req_talking"), new_request("req_silent")
    streams = [await gateway.submit(gateway.prepare(talking))]
    streams.append(await gateway.submit(gateway.prepare(silent)))
    await take(worker)
    worker.heartbeat(new_heartbeat())
    worker.publish({"node-1": step_of(new_frame(talking, 0, (1,)))})
    assert (await anext(streams[0])).token_ids == (1,)
    client.flushall()
    client.script_flush()
    await asyncio.sleep(0.002)
    # The first frame of a request that Redis no longer knows is let through.
    worker.publish({"node-1": step_of(new_frame(talking, 1, (2,)), new_frame(silent, 0, (3,)))})
    assert worker.renew(worker.held) == {}
    assert client.zcard(KEYS.prefix + "lease") == 2
    last = step_of(
        new_frame(talking, 2, (4,), finish_reason="stop"),
        new_frame(silent, 1, (5,), finish_reason="stop"),
    )
    worker.exchange(frames_by_node={"node-1": last}, finished=worker.held)
    rest = [[frame.token_ids async for frame in stream] for stream in streams]
    assert rest == [[(2,), (4,)], [(3,), (5,)]]


async def test_a_waiting_request_survives_a_wiped_redis(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    settings = SETTINGS.model_copy(update={"lease_ms": 200})
    gateway = new_gateway("node-1", settings)
    await gateway.start()
    worker = new_worker()
    stream = await gateway.submit(gateway.prepare(new_request()))
    await eventually(lambda: client.zscore(KEYS.prefix + "nodes", "node-1"))
    await asyncio.sleep(0.1)
    client.flushall()
    await eventually(lambda: client.exists(KEYS.queue("org_1")))
    [again] = await take(worker)
    worker.publish({"node-1": step_of(new_frame(again, 0, (1,), finish_reason="stop"))})
    assert [frame.token_ids async for frame in stream] == [(1,)]


async def test_a_worker_that_reclaims_takes_its_request_out_of_the_queue(
    new_gateway: Gateways, new_worker: Workers, client: redis.Redis
) -> None:
    gateway, worker, other = await started(new_gateway), new_worker(), new_worker("other")
    request = new_request()
    await gateway.submit(gateway.prepare(request))
    await take(worker)
    worker.renew(worker.held)
    client.flushall()
    await asyncio.sleep(0.002)
    await gateway._send(gateway._link(MODEL), gateway.prepare(request))
    assert worker.renew(worker.held) == {}
    assert await take(other) == []
    assert client.zcard(KEYS.prefix + "lease") == 1


async def test_a_worker_is_told_to_stop_what_nobody_listens_to(
    new_gateway: Gateways, new_worker: Workers
) -> None:
    gateway, worker = await started(new_gateway), new_worker()
    request = new_request()
    stream = await gateway.submit(gateway.prepare(request))
    await take(worker)
    gateway._link(MODEL).streams.clear()
    worker.publish({"node-1": step_of(new_frame(request, 0, (1,)))})
    await asyncio.sleep(0.1)
    assert worker.control() == [Cancel("req_1", attempt=1)]
    assert stream.emitted_token_ids == [[]]


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
