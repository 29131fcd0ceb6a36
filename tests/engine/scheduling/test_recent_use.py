"""Between tenants the one that was served least goes first; alone, a tenant notices nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import CostModel
from engine.scheduling.assembly import create_scheduler
from engine.scheduling.recent_use import FORGOTTEN_S, HORIZON_S, NUM_TENANTS_MAX, RecentUse
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.settings import EngineSettings
from engine.simulator.machines import PRESETS
from engine.simulator.policies import OURS
from engine.simulator.report import report
from engine.simulator.simulation import simulate
from engine.simulator.workloads import FLOODING_TENANT, chat, flood
from tests.engine.driver import request
from tests.engine.simulator.machine import MACHINE
from tests.engine.simulator.machine import request as traced

COST = CostModel(base_s=0.0, per_token_s=1e-3, per_prefill_context_s=0, per_decode_context_s=0)
SETTINGS = EngineSettings(max_running=4, step_s=0.05, idle_step_s=0.05)
BOTH = {"greedy": 1.0, "modest": 1.0}


def scheduler(num_blocks: int = 64) -> Scheduler:
    return create_scheduler(SETTINGS, num_blocks=num_blocks, context_length=1024, cost_model=COST)


def add(target: Scheduler, name: str, num_tokens: int, tenant: str, key: float) -> None:
    new = request(name, list(range(num_tokens)), 10, tenant=tenant, key=key)
    target.add(*Sequence.all_of(new, 0))


def first_of(target: Scheduler) -> str:
    return target.schedule(0).chunks[0].sequence.request.request_id


def test_a_debt_is_what_was_used_beyond_the_least_served_and_a_quantum() -> None:
    use = RecentUse(quantum_s=0.1)
    use.note({"greedy": 1.0})
    assert use.surplus_s(BOTH) == {"greedy": pytest.approx(0.9)}
    assert use.surplus_s({"greedy": 1.0}) == {}, "alone"
    assert use.surplus_s({"greedy": 5.0, "modest": 1.0}) == {"greedy": pytest.approx(0.1)}
    use.note({"modest": 0.8})
    assert use.surplus_s(BOTH) == {}, "within the quantum"


def test_a_debt_fades_with_the_work_of_the_machine() -> None:
    use = RecentUse(quantum_s=0.0)
    use.note({"greedy": 1.0})
    use.note({"third": HORIZON_S})
    assert use.used_s("greedy") == pytest.approx(0.3679, abs=1e-4)
    for _ in range(100):
        use.note({"third": 1.0})
    assert use.used_s("third") < HORIZON_S + 1, "nobody owes more than the horizon"


def test_tenants_that_used_next_to_nothing_are_forgotten() -> None:
    use = RecentUse(quantum_s=0.0)
    use.note({"greedy": 1.0})
    use.note({f"t{index}": FORGOTTEN_S / 2 for index in range(NUM_TENANTS_MAX)})
    assert use.used_s("t1") == 0.0
    assert use.used_s("greedy") > 0.5


def test_a_long_prompt_of_another_tenant_passes_the_short_ones_of_a_flood() -> None:
    target = scheduler()
    add(target, "short", 50, "greedy", 0.05)
    add(target, "long", 500, "modest", 0.5)
    assert first_of(target) == "short", "nobody has used anything yet"
    target.use.note({"greedy": 1.0})
    add(target, "next", 50, "greedy", 0.05)
    assert first_of(target) == "long"


def test_one_tenant_alone_goes_by_the_key_whatever_it_has_used() -> None:
    orders = []
    for used_s in (0.0, 3.0):
        target = scheduler()
        target.use.note({"greedy": used_s, "gone": 0.1})
        for index, key in enumerate((0.3, 0.1, 0.2)):
            add(target, f"r{index}", 40, "greedy", key)
        chunks = target.schedule(0).chunks
        orders.append([(each.sequence.request.request_id, each.num_tokens) for each in chunks])
        assert all(sequence.surplus_s == 0 for sequence in target.sequences())
    assert orders[0] == orders[1]


def test_the_order_of_keys_comes_back_when_the_other_tenant_is_gone() -> None:
    target = scheduler()
    target.use.note({"greedy": 1.0})
    add(target, "first", 300, "greedy", 0.1)
    add(target, "other", 20, "modest", 0.2)
    add(target, "second", 300, "greedy", 0.3)
    target.look(target.slots.is_decoding.nonzero()[0], 0)
    names = [sequence.request.request_id for sequence in target.waiting]
    assert names == ["other", "first", "second"]
    target.remove(next(iter(target.waiting)))
    target.look(target.slots.is_decoding.nonzero()[0], 0)
    assert [sequence.place for sequence in target.waiting] == [0.1, 0.3]


@pytest.mark.slow
@given(
    works=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    flood_work=st.integers(1, 300),
    output=st.integers(1, 30),
)
def test_nobody_starves_beside_an_endless_flood(
    works: list[int], flood_work: int, output: int
) -> None:
    """Of either side: both tenants go on sending as fast as the machine can compute."""
    requests = [traced(0.0, flood_work, output, tenant="greedy") for _ in range(40)]
    requests += [traced(0.2 * at, work, output, tenant="modest") for at, work in enumerate(works)]
    requests.sort(key=lambda each: each.arrival_s)
    found = report(simulate(requests, MACHINE, OURS))
    assert found.num_requests == len(requests)


@pytest.mark.slow
def test_a_flood_of_thousands_costs_others_hardly_more_than_a_step() -> None:
    """Simulated on an H100: 2,000 of one tenant, then the others."""
    machine = PRESETS["h100"]
    idle = report(simulate(chat(4.0, 40), machine, OURS))
    flooded = report(simulate(flood(4.0, 40)[8000:], machine, OURS))
    assert flooded.heaviest_tenant == FLOODING_TENANT
    assert flooded.others_ttft.p50 < 1.3 * idle.ttft.p50 + 0.12, "and the longest of the steps"
    assert flooded.others_ttft.p99 < 1.3 * idle.ttft.p99 + 0.12


def test_a_preempted_sequence_takes_no_old_debt_with_it() -> None:
    target = scheduler()
    add(target, "first", 64, "greedy", 0.1)
    [chunk] = target.schedule(0).chunks
    chunk.sequence.surplus_s = 1.0  # as of a step in which another tenant waited
    target._preempt(chunk.sequence)
    assert [sequence.place for sequence in target.waiting] == [0.1]
