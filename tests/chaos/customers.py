"""Customers of a suffering platform: they stream, compare, and ask again only when cut off.

A stream that ends must carry exactly the text of the undisturbed run and say what it cost. A stream
may be cut only by the death of its own API node; then the customer asks the other one, as SDKs do.
"""

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.cluster import MODEL

PAUSE_S = 0.1
GIVE_UP_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, with an answer that is the same every time: greedy or seeded."""

    body: dict[str, Any]

    @classmethod
    def number(cls, index: int) -> "Question":
        """Some of every kind: greedy and seeded, one choice and two, with a stop string."""
        body = {
            "model": MODEL,
            "prompt": f"Question {index}: " + "why " * (3 + 40 * (index % 3)),
            "max_tokens": 200 + 150 * (index % 4),
            "temperature": 0 if index % 2 else 0.8,
            "seed": index,
            "n": 2 if index % 5 == 0 else 1,
            "logprobs": 0 if index % 3 == 0 else None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return cls(body)


@dataclass(slots=True)
class Try:
    """One HTTP request: what came of it."""

    node: str
    request_id: str | None = None
    texts: dict[int, str] = field(default_factory=dict)
    num_logprobs: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False

    @property
    def is_complete(self) -> bool:
        """The whole answer came, the charge included."""
        return self.is_done and self.error is None and self.usage is not None

    def hear(self, event: dict[str, Any]) -> None:
        """Note one event."""
        self.error = event.get("error", self.error)
        self.request_id = event.get("id", self.request_id)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.num_logprobs += len((choice.get("logprobs") or {"tokens": ()})["tokens"])
            if choice["finish_reason"] is not None:
                self.finish_reasons[index] = choice["finish_reason"]

    def same_answer(self, other: "Try") -> bool:
        """Whether both heard the same, to the token."""
        assert self.usage is not None
        assert other.usage is not None
        counts = (self.num_logprobs, self.usage["completion_tokens"], self.finish_reasons)
        others = (other.num_logprobs, other.usage["completion_tokens"], other.finish_reasons)
        return self.texts == other.texts and counts == others


@dataclass(slots=True)
class Customer:
    """Asks through any node, with one key."""

    origins: dict[str, str]
    key: str
    client: httpx.AsyncClient

    async def ask(self, question: Question, node: str) -> Try:
        """One try; whatever happens to the connection is noted, not raised."""
        made = Try(node)
        headers = {"authorization": f"Bearer {self.key}"}
        url = self.origins[node] + "/v1/completions"
        try:
            async with self.client.stream(
                "POST", url, json=question.body, headers=headers
            ) as answer:
                if answer.status_code != 200:
                    made.error = json.loads(await answer.aread())["error"]
                    return made
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        made.is_done = True
                    elif line.startswith("data: "):
                        made.hear(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError:
            return made
        return made

    async def ask_until_answered(self, question: Question) -> list[Try]:
        """Every try; the last one is complete unless nothing helped for two minutes."""
        tries: list[Try] = []
        deadline = asyncio.get_running_loop().time() + GIVE_UP_S
        for node in itertools.cycle(self.origins):
            tries.append(await self.ask(question, node))
            if tries[-1].is_complete or asyncio.get_running_loop().time() > deadline:
                return tries
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("a cycle has no end")
