"""The whole engine under any order of events, with memory for hardly more than one request.

Arrivals with shared prefixes, several choices, failovers, cancellations, dead nodes and failing
steps: every token is the one that the fake model says for the *whole* history, no block is lost,
and everything comes to an end.
"""

import functools
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.engine import Engine
from engine.messages import CostModel, GenerateRequest, Sampling
from engine.model_runner import ModelRunner
from engine.output import StepOutput
from engine.settings import EngineSettings
from tests.engine.driver import request
from tests.engine.fake_model import FakeModel, next_token, repeating_token
from tests.engine.late_runner import LateRunner

NUM_BLOCKS = 7
POISON = 511
COST = CostModel(
    base_s=1e-3, per_token_s=1e-3, per_prefill_context_s=1e-7, per_decode_context_s=1e-7
)
STEP_US = 1_000
"""Between two looks at the clock: how long Python takes decides nothing here."""
TAILS = [[tail] * (7 * tail % 60 + 1) for tail in range(6)]


class EngineMachine(RuleBasedStateMachine):
    """Few blocks, few slots, short steps: preemption and pauses are the normal case."""

    says = staticmethod(next_token)
    cost = COST

    def __init__(self) -> None:
        super().__init__()
        self.model = FakeModel(says=self.says)
        self.model.fails_on_token = POISON
        limits = EngineSettings(
            max_running=6, kept_slots_share=0.2, max_step_tokens=128, step_s=0.05, idle_step_s=0.1
        )
        runner = self.create_runner()
        self.engine = Engine(
            runner,
            limits,
            NUM_BLOCKS,
            cost_model=self.cost,
            now_us=functools.partial(next, itertools.count(step=STEP_US)),
        )
        self.open: dict[str, GenerateRequest] = {}
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[str, set[int]] = {}
        self.fences: dict[str, int] = {}
        self.count = 0

    def create_runner(self) -> ModelRunner:
        return ModelRunner(self.model, NUM_BLOCKS)

    @rule(
        num_shared=st.sampled_from([0, 64, 100, 128]),
        tail=st.sampled_from(TAILS),
        num_tokens=st.integers(1, 160),
        num_choices=st.sampled_from([1, 1, 1, 2, 3]),
        num_emitted=st.sampled_from([0, 0, 0, 5, 70]),
        key=st.floats(0, 3),
        tenant=st.sampled_from(["one", "two"]),
        stop=st.sets(st.integers(0, 63), max_size=8),
        fence=st.sampled_from([1, 5, 70, 160, 160]),
    )
    def arrive(
        self,
        num_shared: int,
        tail: list[int],
        num_tokens: int,
        num_choices: int,
        num_emitted: int,
        key: float,
        tenant: str,
        stop: set[int],
        fence: int,
    ) -> None:
        self.count += 1
        prompt = [3] * num_shared + tail
        emitted: list[int] = []
        if num_choices == 1 and num_emitted < num_tokens:
            for _ in range(num_emitted):
                emitted.append(self.says(prompt + emitted))
        new = request(
            f"r{self.count}",
            prompt,
            num_tokens,
            authorized=min(num_tokens, max(fence, len(emitted))),
            sampling=Sampling(temperature=0, stop_token_ids=tuple(stop)),
            key=key,
            tenant=tenant,
            num_choices=num_choices,
            emitted=tuple(emitted),
            node=f"node{self.count % 3}",
        )
        self.open[new.request_id] = new
        self.ended[new.request_id] = set()
        self.fences[new.request_id] = new.authorized_tokens
        for choice in range(num_choices):
            self.texts[new.request_id, choice] = list(emitted)
        self.engine.add(new)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.sampled_from([-3, 0, 1, 64, 160]))
    def extend(self, data: st.DataObject, more: int) -> None:
        """The fence moves up; a message that comes late, or twice, changes nothing."""
        self._extend(data.draw(st.sampled_from(sorted(self.open))), more)

    def _extend(self, request_id: str, more: int) -> None:
        target = min(self.fences[request_id] + more, self.open[request_id].max_tokens)
        self.fences[request_id] = max(self.fences[request_id], target)
        self.engine.extend(request_id, target)

    @rule(count=st.integers(1, 30))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self._step()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.open))))

    @precondition(lambda self: self._begun_choices())
    @rule(data=st.data())
    def a_choice_has_said_enough(self, data: st.DataObject) -> None:
        request_id, choice = data.draw(st.sampled_from(self._begun_choices()))
        self.engine.end_choice(request_id, choice)
        self.ended[request_id].add(choice)

    def _begun_choices(self) -> list[tuple[str, int]]:
        return [
            (request_id, choice)
            for (request_id, choice), text in self.texts.items()
            if text and request_id in self.open and choice not in self.ended[request_id]
        ]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def come_back_with_the_next_attempt(self, data: st.DataObject) -> None:
        old = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        texts = [self.texts[old.request_id, choice] for choice in range(old.num_choices)]
        new = request(
            old.request_id,
            old.prompt_token_ids,
            old.max_tokens,
            authorized=self.fences[old.request_id],
            sampling=old.sampling,
            key=old.key,
            tenant=old.tenant,
            num_choices=old.num_choices,
            attempt=old.attempt + 1,
            emitted=tuple(map(tuple, texts)) if any(texts) else (),
            ended=tuple(self.ended[old.request_id]),
            node=old.node,
        )
        self.open[old.request_id] = new
        self.engine.add(new)

    @rule(node=st.sampled_from(["node0", "node1", "node2"]))
    def node_dies(self, node: str) -> None:
        self.engine.cancel_nodes({node})
        for request_id in [key for key, new in self.open.items() if new.node == node]:
            del self.open[request_id]

    @rule()
    def a_poisoned_request_arrives(self) -> None:
        self.count += 1
        new = request(f"r{self.count}", [POISON, 1], 3)
        self.open[new.request_id] = new
        self.ended[new.request_id] = set()
        self.fences[new.request_id] = new.authorized_tokens
        self.texts[new.request_id, 0] = []
        self.engine.add(new)

    @invariant()
    def no_block_is_lost(self) -> None:
        assert self.engine.problems() == []
        assert self.engine.stats.num_running <= 6

    def teardown(self) -> None:
        self._run_to_the_end()
        for request_id in list(self.open):
            assert self._stands_at_its_fence(request_id)
            self._extend(request_id, 1_000)
        self._run_to_the_end()
        assert not self.engine.has_work, "a request never came to its end"
        assert self.open == {}
        assert self.engine.problems() == []
        assert self.engine.stats.free_kv_tokens == NUM_BLOCKS * 64

    def _run_to_the_end(self) -> None:
        for _ in range(5_000):
            if not self.engine.has_work:
                break
            self._step()

    def _stands_at_its_fence(self, request_id: str) -> bool:
        open_choices = set(range(self.open[request_id].num_choices)) - self.ended[request_id]
        texts = [self.texts[request_id, choice] for choice in open_choices]
        return all(len(text) == self.fences[request_id] for text in texts)

    def _step(self) -> None:
        try:
            output = self.engine.step()
        except RuntimeError:
            output = self.engine.abandon("planted")
        self._receive(output)

    def _receive(self, output: StepOutput) -> None:
        for frame in (frame for frames in output.frames.values() for frame in frames):
            new = self.open.get(frame.request_id)
            if new is None or frame.attempt != new.attempt:
                continue
            if frame.choice in self.ended[frame.request_id]:
                assert frame.finish_reason == "abort", "a word after the end"
                continue  # the request had been cancelled before
            text = self.texts[frame.request_id, frame.choice]
            assert frame.first_index == len(text), "a gap between frames"
            for token in frame.token_ids:
                assert token == self.says(new.prompt_token_ids + text)
                text.append(token)
            assert len(text) <= self.fences[new.request_id], "the fence was passed"
            if frame.finish_reason is not None:
                self.ended[new.request_id].add(frame.choice)
                self._check_end(new, text, frame.finish_reason)
        finished = {(ended.request_id, ended.attempt) for ended in output.finished}
        for request_id, new in list(self.open.items()):
            is_over = len(self.ended[request_id]) == new.num_choices
            assert is_over == ((request_id, new.attempt) in finished)
            if is_over:
                del self.open[request_id]

    def _check_end(self, new: GenerateRequest, text: list[int], reason: str) -> None:
        stop = new.sampling.stop_token_ids
        if reason == "stop":
            assert text[-1] in stop
        if reason == "length":
            assert len(text) == new.max_tokens
        if reason == "error":
            assert POISON in new.prompt_token_ids or self._was_beside_poison(new)

    def _was_beside_poison(self, new: GenerateRequest) -> bool:
        return any(POISON in other.prompt_token_ids for other in self.open.values())


TestEngineMachine = pytest.mark.slow(
    pytest.mark.usefixtures("eager_admission")(EngineMachine.TestCase)
)


class RepeatingMachine(EngineMachine):
    """The same with texts that repeat themselves, on a machine where drafts cost little."""

    says = staticmethod(repeating_token)
    cost = CostModel(
        base_s=0.02, per_token_s=4e-4, per_prefill_context_s=1e-7, per_decode_context_s=1e-7
    )


TestRepeatingMachine = pytest.mark.slow(
    pytest.mark.usefixtures("eager_admission")(RepeatingMachine.TestCase)
)
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=40)
TestRepeatingMachine.settings = settings(max_examples=60, stateful_step_count=40)


class LateMachine(EngineMachine):
    """The same where each step is planned before the last one's tokens are known."""

    def create_runner(self) -> ModelRunner:
        return LateRunner(self.model, NUM_BLOCKS, num_slots=6)

    def _was_beside_poison(self, new: GenerateRequest) -> bool:
        """A failure is heard a step late, when the poisoned request may have been told of it."""
        return True


TestLateMachine = pytest.mark.slow(pytest.mark.usefixtures("eager_admission")(LateMachine.TestCase))
TestLateMachine.settings = settings(max_examples=40, stateful_step_count=40)
