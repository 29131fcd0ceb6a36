"""What dies in the middle: workers, API nodes, Redis itself, messages on their way."""

import asyncio

import pytest
import redis

from engine.errors import RequestLost
from engine.messages import Cancel
from tests.engine.broker.conftest import MODEL, SETTINGS, Gateways, Workers
from tests.engine.broker.requests import new_frame, new_request, step_of
from tests.engine.broker.walking import KEYS, eventually, expire_lease, new_heartbeat, started, take


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
