"""A worker without a model: real requests from the real queue, one token every so often.

`python -m tests.bench.gateway.null_engine REDIS_URL MODEL DIRECTORY RATE`. The first token leaves at
once, the others at RATE a second; each says the millisecond at which it was sent. Steps are 10 ms:
the frames of a step share one message, as those of a real engine do.
"""

import heapq
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import redis

from engine.broker.settings import BrokerSettings
from engine.broker.window import TakeRoom
from engine.broker.worker import WorkerBroker
from engine.messages import (
    Cancel,
    CostModel,
    Extend,
    GenerateRequest,
    Heartbeat,
    StepFrames,
    Timing,
    TokenFrame,
)
from tests.bench.gateway.words import Words, now_word

STEP_S = 0.01
HEARTBEAT_S = 0.5
RENEW_S = 2.0
"""As often as the real worker."""
TAKE_MAX = 256
TIMING = Timing(queued_us=100, prefill_us=100, decode_us=100)
COST_MODEL = CostModel(
    base_s=1e-3, per_token_s=1e-6, per_prefill_context_s=1e-12, per_decode_context_s=1e-12
)


@dataclass(slots=True)
class _Sequence:
    request: GenerateRequest
    fence: int
    num_emitted: int = 0


@dataclass(slots=True)
class NullEngine:
    """Everything that runs, and when the next token of each is due."""

    broker: WorkerBroker
    model: str
    words: Words
    interval_s: float
    is_stopping: bool = False
    _running: dict[str, _Sequence] = field(default_factory=dict)
    _due: list[tuple[float, str]] = field(default_factory=list)
    _step: int = 0
    _beat_at_s: float = 0.0
    _renewed_at_s: float = 0.0

    def run(self) -> None:
        """Serve until told to stop."""
        while not self.is_stopping:
            now_s = time.monotonic()
            self._keep_alive(now_s)
            frames, finished = self._emit(now_s)
            by_node = {
                node: StepFrames(worker=self.broker.worker, step=self._step, frames=of_node)
                for node, of_node in frames.items()
            }
            exchange = self.broker.exchange(
                frames_by_node=by_node, finished=finished, room=TakeRoom(TAKE_MAX, 0)
            )
            for message in exchange.control:
                if isinstance(message, Cancel) and self._running.pop(message.request_id, None):
                    self.broker.finish([message.request_id])
                elif isinstance(message, Extend) and message.request_id in self._running:
                    self._running[message.request_id].fence = message.authorized_tokens
            for request in exchange.requests:
                self._running[request.request_id] = _Sequence(request, request.authorized_tokens)
                heapq.heappush(self._due, (now_s, request.request_id))
            if not exchange.requests:
                self._wait()

    def _wait(self) -> None:
        """Until the next step, or a request that may be taken."""
        until_s = min(self._beat_at_s + HEARTBEAT_S, self._renewed_at_s + RENEW_S)
        if self._due:
            until_s = min(until_s, max(self._due[0][0], time.monotonic() + STEP_S))
        self.broker.wait(max(0.001, until_s - time.monotonic()))

    def _emit(self, now_s: float) -> tuple[dict[str, list[TokenFrame]], list[str]]:
        """The frames that are due, by API node, and the requests that they end."""
        frames: dict[str, list[TokenFrame]] = {}
        finished = []
        word = self.words.token_ids[now_word()]
        while self._due and self._due[0][0] <= now_s:
            due_s, request_id = heapq.heappop(self._due)
            sequence = self._running.get(request_id)
            if sequence is None:
                continue
            if sequence.num_emitted >= sequence.fence:
                heapq.heappush(self._due, (now_s + STEP_S, request_id))
                continue
            request, first_index = sequence.request, sequence.num_emitted
            sequence.num_emitted += 1
            is_last = sequence.num_emitted == request.max_tokens
            frame = TokenFrame(
                request_id=request_id,
                attempt=request.attempt,
                first_index=first_index,
                token_ids=(word,),
                finish_reason="length" if is_last else None,
                timing=TIMING if is_last or not first_index else None,
            )
            frames.setdefault(request.node, []).append(frame)
            if is_last:
                del self._running[request_id]
                finished.append(request_id)
            else:
                heapq.heappush(self._due, (due_s + self.interval_s, request_id))
        self._step += bool(frames)
        return frames, finished

    def _keep_alive(self, now_s: float) -> None:
        if now_s - self._beat_at_s >= HEARTBEAT_S:
            self._beat_at_s = now_s
            self.broker.heartbeat(self._heartbeat())
        if now_s - self._renewed_at_s >= RENEW_S:
            self._renewed_at_s = now_s
            self.broker.renew(list(self._running))

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            worker=self.broker.worker,
            model=self.model,
            revision="null",
            state="ready",
            sent_ms=time.time_ns() // 1_000_000,
            pid=os.getpid(),
            dtype="float32",
            context_length=1_000_000,
            num_running=len(self._running),
            num_steps=self._step,
            cost_model=COST_MODEL,
        )


def main() -> None:
    """Until SIGTERM."""
    redis_url, model, directory, rate = sys.argv[1:5]
    with redis.Redis.from_url(redis_url) as connection:
        broker = WorkerBroker(connection, "null-engine", model, settings=BrokerSettings())
        engine = NullEngine(broker, model, Words(Path(directory)), 1 / float(rate))

        def stop(signum: int, frame: object) -> None:
            engine.is_stopping = True

        signal.signal(signal.SIGTERM, stop)
        engine.run()


if __name__ == "__main__":
    main()
