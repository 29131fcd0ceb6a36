"""The simulator: results known by hand, the real scheduler inside, the same every time."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from engine.scheduling.scheduler import Scheduler
from engine.simulator.bound import ideal_hits, mean_ttft_bound_s, srpt_mean_s
from engine.simulator.machines import PRESETS
from engine.simulator.policies import INGREDIENTS, OURS, POLICIES
from engine.simulator.report import report
from engine.simulator.simulation import simulate
from engine.simulator.sizing import Target, machines_needed
from engine.simulator.workloads import WORKLOADS, chat, flood, mixed
from tests.engine.simulator.machine import MACHINE, machine, request

H100 = PRESETS["h100"]


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    ledger = simulate([request(1.0, 100, 3)], MACHINE, OURS)
    assert ledger.first_s.tolist() == [pytest.approx(1.1)]
    assert ledger.last_s.tolist() == [pytest.approx(1.102)]
    assert ledger.num_steps == 3
    assert np.concatenate(ledger.gaps_s).tolist() == [pytest.approx(0.001)] * 2


def test_a_long_prompt_pauses_for_a_short_one() -> None:
    ledger = simulate([request(0.0, 1024, 1), request(0.1, 64, 1)], MACHINE, OURS)
    # Steps of at most 256 ms: the short one arrives in the first and has the second for itself.
    assert ledger.first_s[1] == pytest.approx(0.32)
    assert ledger.first_s[0] == pytest.approx(1.088)


def test_under_vllm_a_short_prompt_waits_for_the_long_one_before_it() -> None:
    requests = [request(0.0, 2000, 1), request(0.1, 64, 1)]
    ledger = simulate(requests, MACHINE, POLICIES["vllm"])
    assert ledger.first_s[0] == pytest.approx(2.048)
    assert ledger.first_s[1] == pytest.approx(2.064), (
        "48 of its tokens found room in the fourth step"
    )
    tuned = replace(MACHINE, settings=MACHINE.settings.model_copy(update={"max_step_tokens": 2048}))
    ledger = simulate([request(0.0, 4000, 1), requests[1]], tuned, POLICIES["vllm-tuned"])
    assert ledger.first_s[1] == pytest.approx(2.112), "the threshold leaves room for it"


def test_a_prefix_is_computed_once() -> None:
    requests = [
        request(0.0, 200, 1, prefix="tools", prefix_tokens=128),
        request(1.0, 200, 1, prefix="tools", prefix_tokens=128),
        request(2.0, 200, 1, prefix="tools", prefix_tokens=128, tenant="another"),
    ]
    ledger = simulate(requests, MACHINE, OURS)
    ttft = ledger.first_s - ledger.arrivals_s
    assert ttft.tolist() == pytest.approx([0.2, 0.072, 0.2]), "and by each tenant for itself"
    assert ledger.num_cached.tolist() == [0, 128, 0]


def test_replicas_share_one_queue() -> None:
    requests = [request(0.0, 200, 1) for _ in range(64)]
    alone = simulate(requests, machine(take_window=4), OURS, 1)
    shared = simulate(requests, machine(take_window=4), OURS, 4)
    assert shared.end_s == pytest.approx(alone.end_s / 4, rel=0.05)


def test_the_same_input_gives_the_same_result() -> None:
    for name in ("ncompass", "vllm", "sglang"):
        runs = [simulate(chat(30.0, 20, seed=3), H100, POLICIES[name]) for _ in range(2)]
        assert runs[0].first_s.tolist() == runs[1].first_s.tolist(), name
        assert runs[0].last_s.tolist() == runs[1].last_s.tolist(), name


def test_the_schedulers_own_code_runs_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = chat(30.0, 20)
    before = simulate(requests, H100, OURS)
    launch = Scheduler.launch
    calls: list[object] = []
    monkeypatch.setattr(Scheduler, "launch", lambda s, b: calls.append(b) or launch(s, b))
    simulate(requests, H100, OURS)
    assert len(calls) == before.num_steps

    def never_caches(*arguments: object) -> list[int]:
        return []

    agents = WORKLOADS["agent"](1.0, 40, 1)
    assert report(simulate(agents, H100, OURS)).cached_share > 0.5
    monkeypatch.setattr("engine.memory.prefix_cache.PrefixCache.match", never_caches)
    assert report(simulate(agents, H100, OURS)).cached_share == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES.values(), ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", ["mixed", "agent"])
def test_no_policy_beats_the_bound(kind: str, policy: object) -> None:
    requests = WORKLOADS[kind](4.0, 30, 2)
    ledger = simulate(requests, H100, policy)  # type: ignore[arg-type]  # a name from a list
    found = report(ledger)
    assert found.num_requests == 30
    assert found.ttft.mean >= mean_ttft_bound_s(requests, H100)


def test_shortest_remaining_first_is_the_least_mean_time() -> None:
    # 5 runs alone for 1, then 1 and 2 interrupt it: ends at 2, 4 and 8.
    assert srpt_mean_s([0.0, 1.0, 1.0], [5.0, 1.0, 2.0]) == pytest.approx((8 + 1 + 3) / 3)
    assert srpt_mean_s([0.0, 10.0], [1.0, 1.0]) == pytest.approx(1.0)


def test_the_bound_knows_what_an_ideal_cache_would_hold() -> None:
    requests = [
        request(0.0, 100, 1, prefix="p", prefix_tokens=100),
        request(1.0, 300, 1, prefix="p", prefix_tokens=300),
        request(2.0, 300, 1, prefix="p", prefix_tokens=300),
        request(3.0, 300, 1, prefix="p", prefix_tokens=300, tenant="another"),
    ]
    assert ideal_hits(requests) == [0, 100, 299, 0]


@pytest.mark.slow
def test_every_ingredient_can_be_left_out() -> None:
    requests = mixed(8.0, 60, seed=1)
    ours = report(simulate(requests, H100, OURS)).ttft.mean
    without = {
        name: report(simulate(requests, H100, POLICIES[policy])).ttft.mean
        for name, policy in INGREDIENTS.items()
    }
    assert without["order"] > 1.2 * ours
    assert all(seconds > 0 for seconds in without.values())


def test_a_full_cache_preempts_under_vllm_and_not_under_ours() -> None:
    small = machine(kv_tokens=64 * 24, max_running=16)
    requests = [request(0.01 * index, 100, 150, max_output=200) for index in range(24)]
    assert simulate(requests, small, POLICIES["vllm"]).num_preemptions > 0
    assert simulate(requests, small, OURS).num_preemptions == 0
    for name in ("sglang", "ncompass-no-reservation"):
        assert report(simulate(requests, small, POLICIES[name])).num_requests == 24


def test_what_can_never_run_is_refused_and_the_rest_is_not() -> None:
    requests = [request(0.0, 100, 1), request(0.0, 64 * 700, 1), request(0.0, 100, 1)]
    found = report(simulate(requests, MACHINE, OURS))
    assert (found.num_requests, found.num_refused) == (2, 1)


def test_a_flood_delays_everybody_under_one_queue_and_nobody_under_ours() -> None:
    requests = flood(20.0, 30)[9500:]  # 500 of one tenant, then the others
    ours, vllm = (report(simulate(requests, H100, POLICIES[name])) for name in ("ncompass", "vllm"))
    assert ours.heaviest_tenant == vllm.heaviest_tenant == "flooding"
    assert ours.others_ttft.p99 < 0.5 * vllm.others_ttft.p99
    assert ours.tokens_per_s > 0.97 * vllm.tokens_per_s


def test_a_big_request_does_not_starve_behind_an_endless_stream_of_small_ones() -> None:
    in_order = replace(OURS, alpha=10.0)
    big = request(1.0, 1100, 2)
    load = sorted(
        [big, *(request(0.025 * index, 10, 20) for index in range(400))],
        key=lambda each: each.arrival_s,
    )
    waits = []
    for lock_s in (0.5, 1e9):
        ledger = simulate(load, machine(kv_tokens=64 * 20, backfill_lock_s=lock_s), in_order)
        waits.append(float(ledger.first_s[load.index(big)] - big.arrival_s))
    assert waits[0] < 4.0, "nobody passes it any more, what runs ends, and it starts"
    assert waits[1] > 2 * waits[0], "without the lock memory is never free for it"


@pytest.mark.slow
def test_the_least_number_of_machines_meets_the_target_and_one_less_does_not() -> None:
    requests = chat(90.0, 60)
    target = Target(ttft_p99_s=0.2)
    sizing = machines_needed(requests, H100, OURS, target)
    assert sizing.num_machines is not None
    assert sizing.num_machines > 1
    assert target.is_met(sizing.report)
    fewer = report(simulate(requests, H100, OURS, sizing.num_machines - 1))
    assert not target.is_met(fewer)
    hopeless = machines_needed(requests, H100, OURS, Target(ttft_p99_s=1e-6), most=2)
    assert hopeless.num_machines is None


def test_it_needs_no_tensors() -> None:
    code = "import sys, infra.cli.simulate; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "False"
