"""Builds requests and runs an engine to its end."""

from dataclasses import dataclass, field

from engine.engine import Engine
from engine.messages import GenerateRequest, PromptLogprobs, Sampling, TokenFrame, TokenLogprob
from engine.model_runner import ModelRunner
from engine.models.model import Model
from engine.scheduling.planner import PlanFunction, plan
from engine.settings import EngineSettings

GREEDY = Sampling(temperature=0.0)


def request(
    request_id: str,
    prompt: list[int],
    num_tokens: int = 8,
    *,
    authorized: int | None = None,
    sampling: Sampling = GREEDY,
    key: float = 0.0,
    tenant: str = "tenant",
    num_choices: int = 1,
    attempt: int = 1,
    emitted: tuple[int, ...] | tuple[tuple[int, ...], ...] = (),
    ended: tuple[int, ...] = (),
    node: str = "node",
    first_prompt_logprob: int = 1,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model="model",
        node=node,
        tenant=tenant,
        prompt_token_ids=prompt,
        sampling=sampling,
        authorized_tokens=num_tokens if authorized is None else authorized,
        max_tokens=num_tokens,
        arrival_ms=0,
        key=key,
        num_choices=num_choices,
        attempt=attempt,
        emitted_token_ids=by_choice(emitted),
        ended_choices=ended,
        first_prompt_logprob=first_prompt_logprob,
    )


def by_choice(
    emitted: tuple[int, ...] | tuple[tuple[int, ...], ...],
) -> tuple[tuple[int, ...], ...]:
    """What one choice has emitted, or each."""
    choices = tuple(part for part in emitted if isinstance(part, tuple))
    tokens = tuple(part for part in emitted if isinstance(part, int))
    return (tokens,) if tokens else choices


@dataclass
class Received:
    """One choice as a gateway would assemble it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    frames: list[TokenFrame] = field(default_factory=list)


class Driver:
    """Feeds an engine, assembles its frames and checks that no frame has a gap."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.received: dict[tuple[str, int], Received] = {}
        self.finished: list[str] = []
        self.charges: dict[str, float] = {}
        self.emitted: dict[tuple[str, int], int] = {}

    def add(self, new: GenerateRequest) -> None:
        for choice in range(new.num_choices):
            emitted = new.emitted_token_ids[choice : choice + 1]
            self.emitted[new.request_id, choice] = sum(map(len, emitted))
        self.engine.add(new)

    def step(self) -> None:
        output = self.engine.step()
        for frames in output.frames.values():
            for frame in frames:
                self._receive(frame)
        self.finished += [ended.request_id for ended in output.finished]
        for tenant, seconds in output.charges.items():
            self.charges[tenant] = self.charges.get(tenant, 0.0) + seconds

    def _receive(self, frame: TokenFrame) -> None:
        received = self.received.setdefault((frame.request_id, frame.choice), Received())
        assert received.finish_reason is None, "a frame after the last one"
        start = self.emitted.get((frame.request_id, frame.choice), 0)
        assert frame.first_index == start + len(received.token_ids), "a gap between frames"
        if not received.token_ids:
            received.num_cached_tokens = frame.num_cached_tokens
        received.frames.append(frame)
        received.token_ids += frame.token_ids
        received.logprobs += frame.logprobs or ()
        if frame.prompt_logprobs is not None:
            assert not received.token_ids, "the prompt comes before the answer"
            received.prompt_logprobs.append(frame.prompt_logprobs)
        received.finish_reason = frame.finish_reason
        received.error = frame.error
        received.stop_token_id = frame.stop_token_id

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "the engine did not come to an end"
        assert self.engine.problems() == []

    def generate(self, requests: list[GenerateRequest]) -> list[list[int]]:
        for new in requests:
            self.add(new)
        self.run()
        return [self.received[new.request_id, 0].token_ids for new in requests]


def create_driver(
    model: Model, num_blocks: int = 64, *, policy: PlanFunction = plan, **settings: object
) -> Driver:
    runner = ModelRunner(model, num_blocks)
    engine_settings = EngineSettings(**settings)  # type: ignore[arg-type]
    return Driver(Engine(runner, engine_settings, num_blocks, policy=policy))
