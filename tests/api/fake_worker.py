"""A worker with a scripted model: it takes real requests from the real queue and emits set tokens.

Everything between the API and the engine is real (Redis, the Lua scripts, leases, heartbeats); only
the arithmetic is missing, so that a test decides what the "model" says and when.
"""

import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import redis

from engine.broker.settings import BrokerSettings
from engine.broker.window import NO_ROOM, TakeRoom
from engine.broker.worker import WorkerBroker
from engine.messages import (
    Cancel,
    CostModel,
    EndChoice,
    Extend,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    PromptLogprobs,
    StepFrames,
    Timing,
    TokenFrame,
    TokenLogprob,
    Utilisation,
    WorkerState,
)

TICK_S = 0.004
HEARTBEAT_S = 0.2
EOS = 2
TIMING = Timing(
    queued_us=1_000,
    behind_own_us=300,
    behind_others_us=500,
    num_tenants=2,
    prefill_us=2_000,
    decode_us=30_000,
)


@dataclass(frozen=True)
class Script:
    """What the model says to one request."""

    token_ids: tuple[int, ...] = ()
    first_delay_s: float = 0.0
    delay_s: float = 0.0
    end: Literal["stop", "error", "never"] = "stop"
    num_cached_tokens: int = 0
    tokens_per_frame: int = 1
    choice_delay_s: float = 0.0
    """Each choice begins so much later than the one before."""
    short_choice: int | None = None
    """All choices but the first end after so many tokens."""
    refusal: str = ""
    """Why the structure of the request cannot be compiled."""
    vector: bytes | None = None
    """What a model that pools answers."""
    prompt_parts: tuple[int, ...] = ()
    """Lengths of the parts in which the logprobs of a prompt are told; what is left is told last."""
    lost_token: int | None = None
    """The frame of this token never arrives, as from a Redis that was wiped in between."""


@dataclass
class _Sequence:
    request: GenerateRequest
    choice: int
    script: Script
    due_s: float
    num_emitted: int = 0
    is_ended: bool = False
    num_scored: int = 0
    """Parts of the prompt's logprobs that were told."""
    is_accepted: bool = False
    """Its structure is compiled, or it has none."""

    @property
    def is_at_fence(self) -> bool:
        return self.num_emitted >= self.request.authorized_tokens < self.request.max_tokens


@dataclass
class FakeWorker:
    """Runs in a thread until `stop`; `script_of` decides per request."""

    redis_url: str
    model: str
    settings: BrokerSettings
    script_of: Callable[[GenerateRequest], Script] = lambda request: Script()
    name: str = "fake-worker"
    requests: list[GenerateRequest] = field(default_factory=list)
    extensions: list[Extend] = field(default_factory=list)
    ended_choices: list[EndChoice] = field(default_factory=list)
    cancelled: dict[str, float] = field(default_factory=dict)
    num_emitted: int = 0
    is_taking: bool = True
    total_kv_tokens: int = 0
    """Room in its KV cache; 0: it does not say."""
    state: WorkerState = "ready"
    """What its heartbeats say; only a ready one takes requests."""
    is_dead: bool = False
    """Says nothing any more, not even a heartbeat: as after kill -9."""

    def __post_init__(self) -> None:
        self._sequences: dict[str, list[_Sequence]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> "FakeWorker":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    @property
    def num_running(self) -> int:
        return len(self._sequences)

    def _run(self) -> None:
        try:
            with redis.Redis.from_url(self.redis_url) as connection:
                broker = WorkerBroker(connection, self.name, self.model, settings=self.settings)
                self._serve(broker)
        except BaseException as failure:
            self.failure = failure

    def _serve(self, broker: WorkerBroker) -> None:
        beat_at_s = 0.0
        step = 0
        while not self._stopping.is_set():
            if self.is_dead:
                time.sleep(TICK_S)
                continue
            now_s = time.monotonic()
            if now_s - beat_at_s >= HEARTBEAT_S:
                beat_at_s = now_s
                broker.heartbeat(self._heartbeat(step))
                broker.renew(list(self._sequences))
            frames, finished = self._step(now_s)
            step += bool(frames)
            by_node = {
                node: StepFrames(worker=self.name, step=step, frames=of_node)
                for node, of_node in frames.items()
            }
            exchange = broker.exchange(
                frames_by_node=by_node,
                finished=finished,
                room=TakeRoom(64, 0) if self.is_taking and self.state == "ready" else NO_ROOM,
            )
            for message in exchange.control:
                if isinstance(message, Cancel):
                    self._cancel(broker, message)
                elif isinstance(message, Extend):
                    self._extend(message)
                elif isinstance(message, EndChoice):
                    self._end_choice(message)
            for request in exchange.requests:
                self._begin(request)
            if not self._sequences:
                broker.wait(0.05)
            else:
                time.sleep(TICK_S)

    def _begin(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        script = self.script_of(request)
        due_s = time.monotonic() + script.first_delay_s
        emitted = request.emitted_token_ids or ((),) * request.num_choices
        self._sequences[request.request_id] = [
            _Sequence(
                request,
                choice,
                script,
                due_s + choice * script.choice_delay_s,
                num_emitted=len(emitted[choice]),
            )
            for choice in range(request.num_choices)
            if choice not in request.ended_choices
        ]

    def _extend(self, message: Extend) -> None:
        self.extensions.append(message)
        for sequence in self._sequences.get(message.request_id, []):
            sequence.request = msgspec.structs.replace(
                sequence.request, authorized_tokens=message.authorized_tokens
            )

    def _cancel(self, broker: WorkerBroker, message: Cancel) -> None:
        if self._sequences.pop(message.request_id, None) is not None:
            self.cancelled[message.request_id] = time.monotonic()
            broker.finish([message.request_id])

    def _end_choice(self, message: EndChoice) -> None:
        self.ended_choices.append(message)
        for sequence in self._sequences.get(message.request_id, []):
            sequence.is_ended |= sequence.choice == message.choice

    def _step(self, now_s: float) -> tuple[dict[str, list[TokenFrame]], list[str]]:
        frames: dict[str, list[TokenFrame]] = {}
        finished = []
        for request_id, sequences in list(self._sequences.items()):
            for sequence in sequences:
                if sequence.is_ended or sequence.is_at_fence:
                    continue
                if now_s >= sequence.due_s:
                    frame = self._frame(sequence)
                    lost = sequence.script.lost_token
                    if frame is not None and frame.first_index != lost:
                        frames.setdefault(sequence.request.node, []).append(frame)
            if all(sequence.is_ended for sequence in sequences):
                del self._sequences[request_id]
                finished.append(request_id)
        return frames, finished

    def _frame(self, sequence: _Sequence) -> TokenFrame | None:
        if sequence.request.structure is not None and not sequence.is_accepted:
            return self._verdict(sequence)
        script, request = sequence.script, sequence.request
        if (scored := self._scored(sequence)) is not None:
            return scored
        if script.vector is not None:
            sequence.is_ended = True
            return TokenFrame(
                request_id=request.request_id,
                attempt=request.attempt,
                first_index=0,
                token_ids=(),
                finish_reason="stop",
                timing=TIMING,
                vector=script.vector,
            )
        start = sequence.num_emitted
        room = request.max_tokens - start
        take = min(script.tokens_per_frame, request.authorized_tokens - start)
        end = None if sequence.choice == 0 else script.short_choice
        token_ids = script.token_ids[:end][start : start + take]
        reason: FinishReason | None = None
        error = stop_token_id = None
        if not token_ids:
            if script.end == "never":
                return None
            if script.end == "error":
                reason, error = "error", "scripted failure"
            else:
                token_ids, reason, stop_token_id = (EOS,), "stop", EOS
        elif len(token_ids) == room:
            reason = "length"
        sequence.num_emitted += len(token_ids)
        self.num_emitted += len(token_ids)
        sequence.is_ended = reason is not None
        sequence.due_s += script.delay_s
        return TokenFrame(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=start,
            token_ids=tuple(token_ids),
            choice=sequence.choice,
            logprobs=self._logprobs(request, token_ids),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=error,
            num_cached_tokens=script.num_cached_tokens if start == 0 else 0,
            timing=TIMING if reason or start == 0 else None,
        )

    @staticmethod
    def _scored(sequence: _Sequence) -> TokenFrame | None:
        """The next part of the prompt's logprobs: -0.25 each, the second likeliest of all."""
        request = sequence.request
        num_top = request.sampling.num_prompt_logprobs
        num_prompt = len(request.prompt_token_ids)
        first = request.first_prompt_logprob
        if num_top is None or sequence.choice != 0 or first >= num_prompt:
            return None
        parts = sequence.script.prompt_parts
        count = num_prompt - first
        if sequence.num_scored < len(parts):
            count = min(count, parts[sequence.num_scored])
        sequence.num_scored += 1
        sequence.due_s += sequence.script.delay_s
        sequence.request = msgspec.structs.replace(request, first_prompt_logprob=first + count)
        likeliest = [
            (token_id + 1 + k) % 1_000
            for token_id in request.prompt_token_ids[first : first + count]
            for k in range(num_top)
        ]
        top = [-0.125 - k for _ in range(count) for k in range(num_top)]
        return TokenFrame(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=0,
            token_ids=(),
            prompt_logprobs=PromptLogprobs(
                first_position=first,
                num_tokens=count,
                logprobs=struct.pack(f"<{count}f", *[-0.25] * count),
                ranks=struct.pack(f"<{count}i", *[2] * count),
                num_top=num_top,
                top_ids=struct.pack(f"<{len(likeliest)}i", *likeliest),
                top_logprobs=struct.pack(f"<{len(top)}f", *top),
            ),
        )

    @staticmethod
    def _verdict(sequence: _Sequence) -> TokenFrame:
        """What compiling the structure came to."""
        refusal = sequence.script.refusal
        sequence.is_accepted, sequence.is_ended = True, bool(refusal)
        return TokenFrame(
            request_id=sequence.request.request_id,
            attempt=sequence.request.attempt,
            first_index=0,
            token_ids=(),
            choice=sequence.choice,
            finish_reason="error" if refusal else None,
            error=refusal or None,
            is_refused=bool(refusal),
            is_accepted=not refusal,
        )

    @staticmethod
    def _logprobs(
        request: GenerateRequest, token_ids: tuple[int, ...]
    ) -> tuple[TokenLogprob, ...] | None:
        wanted = request.sampling.num_logprobs
        if wanted is None:
            return None
        return tuple(
            TokenLogprob(-0.5, tuple((token_id + k, -0.5 - k) for k in range(wanted)))
            for token_id in token_ids
        )

    def _heartbeat(self, step: int) -> Heartbeat:
        return Heartbeat(
            worker=self.name,
            model=self.model,
            revision="test",
            state=self.state,
            sent_ms=time.time_ns() // 1_000_000,
            pid=os.getpid(),
            dtype="bfloat16",
            context_length=8192,
            num_running=len(self._sequences),
            num_steps=step,
            total_kv_tokens=self.total_kv_tokens,
            utilisation=Utilisation(compute=0.75, bandwidth=0.25, neither_bound_s_total=3.0),
            cost_model=CostModel(
                base_s=0.01, per_token_s=1e-4, per_prefill_context_s=1e-8, per_decode_context_s=1e-8
            ),
        )
