"""The fairness receipt: whose work stood before a request."""

import pytest

from engine.scheduling.waits import MAX_POINTS, SPAN_US, Waited, WaitLedger
from tests.engine.driver import create_driver, request
from tests.engine.fake_model import FakeModel

SECOND = 1_000_000


def test_a_wait_is_split_by_whose_work_the_machine_did() -> None:
    waits = WaitLedger()
    waits.note({"own": 1.0}, 0, SECOND)
    waits.note({"own": 0.25, "b": 0.5, "c": 0.25}, SECOND, 2 * SECOND)
    waits.note({"b": 1.0}, 2 * SECOND, 3 * SECOND)
    assert waits.behind("own", 0, 3 * SECOND) == Waited(1_250_000, 1_750_000, 3)
    assert waits.behind("own", 2 * SECOND, 3 * SECOND) == Waited(0, SECOND, 1)
    assert waits.behind("new", 0, SECOND) == Waited(0, SECOND, 3)


def test_a_step_that_was_under_way_counts_for_its_rest() -> None:
    waits = WaitLedger()
    waits.note({"b": 4.0}, 0, 4 * SECOND)
    assert waits.behind("own", 3 * SECOND, 5 * SECOND) == Waited(0, SECOND, 1)


def test_idle_time_is_nobodys() -> None:
    waits = WaitLedger()
    assert waits.behind("own", 0, SECOND) == Waited()
    waits.note({"b": 1.0}, 0, SECOND)
    waits.note({"b": 1.0}, 9 * SECOND, 10 * SECOND)
    assert waits.behind("own", 2 * SECOND, 9 * SECOND).behind_others_us == 0


def test_a_long_life_of_short_steps_stays_small_and_right() -> None:
    waits = WaitLedger()
    for step in range(200_000):
        at = step * 20_000
        waits.note({"a" if step % 2 else "b": 0.02}, at, at + 20_000)
    end = 200_000 * 20_000
    waited = waits.behind("a", end - 600 * SECOND, end)
    assert waited.behind_own_us == pytest.approx(300 * SECOND, rel=1e-3)
    assert waited.behind_others_us == pytest.approx(300 * SECOND, rel=1e-3)
    assert len(waits._all.times_us) <= MAX_POINTS + 2


def test_a_tenant_of_long_ago_is_forgotten() -> None:
    waits = WaitLedger()
    waits.note({"old": 1.0}, 0, SECOND)
    waits.note({"new": 1.0}, SPAN_US + 2 * SECOND, SPAN_US + 3 * SECOND)
    assert waits.behind("new", 0, SPAN_US + 3 * SECOND).num_tenants == 1


def test_a_request_is_told_on_its_first_frame_what_it_waited_for() -> None:
    run = create_driver(FakeModel(), 64, max_running=1)
    run.add(request("first", list(range(50)), 20, tenant="a"))
    run.add(request("second", list(range(60)), 20, tenant="b", key=1.0))
    run.add(request("third", list(range(70)), 20, tenant="b", key=2.0))
    run.run()
    first, second, third = (
        run.received[key, 0].frames[0].timing for key in ("first", "second", "third")
    )
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.behind_own_us, first.behind_others_us, first.num_tenants) == (0, 0, 1)
    assert second.behind_own_us == 0
    assert second.behind_others_us > 0
    assert third.behind_own_us > 0
    assert third.behind_others_us > 0
    assert third.num_tenants == 2
    waits = [timing.behind_own_us + timing.behind_others_us for timing in (second, third)]
    assert all(wait <= t.queued_us for wait, t in zip(waits, (second, third), strict=True))
    last = run.received["third", 0].frames[-1].timing
    assert last is not None
    assert (last.behind_own_us, last.num_tenants) == (third.behind_own_us, third.num_tenants)
