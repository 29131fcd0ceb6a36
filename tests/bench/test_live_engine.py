"""The live driver of the scheduler's benchmark, with a model that costs nothing."""

from dataclasses import replace

from engine.engine import Engine
from engine.messages import CostModel
from engine.model_runner import ModelRunner
from engine.settings import EngineSettings
from engine.simulator.policies import POLICIES
from engine.simulator.report import report
from engine.simulator.workloads import chat
from tests.bench.live_engine import LiveRun
from tests.engine.fake_model import FakeModel

COST = CostModel(base_s=1e-3, per_token_s=1e-5, per_prefill_context_s=0.0, per_decode_context_s=0.0)


class WideModel(FakeModel):
    """Takes the ids of made-up prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = type(self.spec)(49_152, 4096, 1, "fake")


def test_every_request_of_a_trace_gets_its_tokens_under_ours_and_a_peers_policy() -> None:

    settings = EngineSettings(max_running=8)
    requests = [
        replace(each, prompt_tokens=1 + each.prompt_tokens % 200, output_tokens=5)
        for each in chat(200.0, 12)
    ]
    requests = [replace(each, max_output_tokens=5) for each in requests]
    for name in ("ncompass", "vllm"):
        policy = POLICIES[name]
        engine = Engine(
            ModelRunner(WideModel(), 64), settings, 64, cost_model=COST, policy=policy.plan
        )
        ledger = LiveRun(engine, settings, policy, COST, requests).run()
        found = report(ledger)
        assert found.num_requests == 12
        assert sum(map(len, ledger.gaps_s)) == 12 * 4
        assert found.ttft.p50 > 0
