"""A few real requests to a model that nobody may call yet: through its queue, to its worker.

The first one makes the worker load it and warms it up. Nothing is billed: no account is involved.
"""

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

from common.clock import utc_now_us
from common.ids import new_id
from engine.broker.gateway import GatewayBroker
from engine.errors import ModelRefused
from engine.messages import GenerateRequest, Heartbeat, Sampling, TokenFrame
from engine.pooling import kind_of
from engine.tokenization import Tokenizer

QUESTION = "What is the capital of France? Answer in one sentence."
NUM_TOKENS = 16
FP32_BYTES = 4
TENANT = "operator"
POLL_S = 0.2
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class SmokeTest:
    """One model in the queue, and the files that its answers are read with."""

    broker: GatewayBroker
    model: str
    directory: Path

    async def load(self, timeout_s: float) -> Heartbeat:
        """Ask once, so that a worker loads the model. Raises ModelRefused when none can."""
        asking = asyncio.create_task(self._frames([1]))
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    beats = await self.broker.heartbeats(self.model)
                    for beat in beats:
                        if beat.state == "ready":
                            return beat
                    failed = [beat for beat in beats if beat.state == "failed"]
                    if failed and len(failed) == len(beats):
                        raise ModelRefused(failed[0].load_report)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ModelRefused(f"no worker has loaded it within {timeout_s:.0f} s") from None
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def run(self) -> str:
        """Template, prompt, determinism; what it answered. Raises ModelRefused."""
        tokenizer = await asyncio.to_thread(Tokenizer.load, self.directory)
        if self._is_pooled:
            return await self._compare_vectors(tokenizer)
        if tokenizer.has_chat_template:
            prompt = await tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
        else:
            prompt = await tokenizer.encode_text(QUESTION, add_special_tokens=True)
        if not prompt:
            raise ModelRefused("its tokenizer makes no tokens of a question")
        first, second = await self._answer(prompt), await self._answer(prompt)
        if first != second:
            raise ModelRefused("the same question got two answers, although it decodes greedily")
        # It is not stopped by the end of its answer, which may come at once; what is shown is.
        said = itertools.takewhile(lambda token: token not in tokenizer.eos_token_ids, first)
        return b"".join(tokenizer.token_text(token) for token in said).decode(errors="replace")

    @property
    def _is_pooled(self) -> bool:
        return kind_of(self.directory) != "generate"

    async def _compare_vectors(self, tokenizer: Tokenizer) -> str:
        """A question's vector, or the score of it beside itself, twice."""
        is_pair = kind_of(self.directory) == "rerank"
        ((prompt, _),) = await tokenizer.encode_whole(
            [(QUESTION, QUESTION) if is_pair else QUESTION]
        )
        first, second = await self._vector(prompt), await self._vector(prompt)
        if first != second:
            raise ModelRefused("the same question got two vectors")
        return f"a vector of {len(first) // FP32_BYTES}"

    async def _vector(self, prompt: list[int]) -> bytes:
        vectors = [frame.vector for frame in await self._frames(prompt) if frame.vector is not None]
        if not vectors:
            raise ModelRefused("a first request was not answered")
        return vectors[0]

    async def _answer(self, prompt: list[int]) -> list[int]:
        tokens = [token for frame in await self._frames(prompt) for token in frame.token_ids]
        if not tokens:
            raise ModelRefused("a first request was not answered")
        return tokens

    async def _frames(self, prompt: list[int]) -> list[TokenFrame]:
        request = GenerateRequest(
            request_id=new_id("smoke"),
            model=self.model,
            node=self.broker.node,
            tenant=TENANT,
            prompt_token_ids=prompt,
            sampling=Sampling(temperature=0.0),
            authorized_tokens=NUM_TOKENS,
            max_tokens=NUM_TOKENS,
            arrival_ms=utc_now_us() // 1_000,
            key=0.0,
            is_pooled=self._is_pooled,
        )
        stream = await self.broker.submit(self.broker.prepare(request))
        frames: list[TokenFrame] = []
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                async for frame in stream:
                    frames.append(frame)
                    if frame.error is not None:
                        raise ModelRefused(f"a first request failed: {frame.error}")
        except TimeoutError:
            raise ModelRefused("a first request was not answered in time") from None
        finally:
            await stream.cancel()
        return frames
