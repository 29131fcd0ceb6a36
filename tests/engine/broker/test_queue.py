"""Who is taken when, who is woken for it, and what leaves the queue, against real Redis servers."""

import asyncio

import redis

from engine.messages import Cancel, CheckIntegrity, EndChoice, Extend
from tests.engine.broker.conftest import MODEL, Gateways, Workers
from tests.engine.broker.requests import new_frame, new_request
from tests.engine.broker.walking import KEYS, eventually, started, take


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
