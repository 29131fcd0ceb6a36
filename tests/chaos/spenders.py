"""Customers of the soak: they stream, wait or hang up, note what they saw, and pay in again."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from sqlalchemy.exc import OperationalError

from billing import topups
from billing.errors import PaymentsUnavailable
from billing.payment_models import Topup
from billing.stripe_client import Payments
from billing.topups import ReturnPages
from common.db import Sessions, read_only
from common.ids import new_id
from tests.billing.fake_stripe.pump import Pump
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.fake_stripe.state import GOOD
from tests.chaos.cluster import MODEL, NODES, Cluster

TOPUP_CENTS = 5_000
TOPUP_EVERY_S = 2.0


@dataclass(slots=True)
class Heard:
    """What a customer saw of one request."""

    request_id: str
    num_tokens: int = 0
    usage: dict[str, Any] | None = None
    is_whole: bool = False
    """The answer came to its end, the charge included."""


@dataclass(slots=True)
class Log:
    """Everything that customers saw."""

    heard: list[Heard] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Customer:
    """Asks any node in any of three ways."""

    cluster: Cluster
    key: str
    client: httpx.AsyncClient
    log: Log
    random: random.Random

    async def live(self, is_over: asyncio.Event) -> None:
        """One request after the other; whatever happens to a connection is only noted."""
        while not is_over.is_set():
            way = self.random.choice((self.stream, self.hang_up, self.wait))
            try:
                await way()
            except httpx.HTTPError:
                self.log.counts["broken"] += 1
                await asyncio.sleep(0.3)

    async def stream(self) -> None:
        """Listen to the end."""
        await self._listen(self.random.randint(20, 200), until=10**9)

    async def hang_up(self) -> None:
        """Listen to the beginning."""
        self.log.counts["hung_up"] += 1
        await self._listen(200, until=self.random.randint(0, 60))

    async def wait(self) -> None:
        """The whole answer at once."""
        body = self._body(self.random.randint(5, 100))
        answer = await self.client.post(self._url(), json=body, headers=self._headers())
        if await self._was_refused(answer):
            return
        whole = answer.json()
        heard = Heard(whole["id"], is_whole=True)
        _note(heard, whole)
        self.log.heard.append(heard)

    async def _listen(self, max_tokens: int, *, until: int) -> None:
        body = self._body(max_tokens)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        url, headers = self._url(), self._headers()
        async with self.client.stream("POST", url, json=body, headers=headers) as answer:
            if await self._was_refused(answer):
                return
            heard: Heard | None = None
            async for line in answer.aiter_lines():
                if line == "data: [DONE]" and heard is not None:
                    heard.is_whole = heard.usage is not None
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "id" in event and heard is None:
                        heard = Heard(event["id"])
                        self.log.heard.append(heard)
                    if heard is not None:
                        _note(heard, event)
                if heard is not None and heard.num_tokens >= until:
                    return

    async def _was_refused(self, answer: httpx.Response) -> bool:
        if answer.status_code == 200:
            return False
        await answer.aread()
        assert answer.status_code in (402, 500, 503), (answer.status_code, answer.text)
        code = answer.json()["error"]["code"]
        self.log.counts[code if answer.status_code == 402 else f"{answer.status_code} {code}"] += 1
        await asyncio.sleep(0.2)
        return True

    def _body(self, max_tokens: int) -> dict[str, Any]:
        words = "why " * self.random.randint(1, 60)
        body: dict[str, Any] = {"model": MODEL, "prompt": words, "max_tokens": max_tokens}
        return body | {"temperature": 0, "logprobs": 0, "n": self.random.choice((1, 1, 2))}

    def _url(self) -> str:
        return self.cluster.origin(self.random.choice(NODES)) + "/v1/completions"

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


def _note(heard: Heard, event: dict[str, Any]) -> None:
    """Count tokens; the one that ends a choice by itself has no text."""
    heard.usage = event.get("usage") or heard.usage
    for choice in event.get("choices", ()):
        heard.num_tokens += len((choice.get("logprobs") or {"tokens": ()})["tokens"])
        heard.num_tokens += choice.get("finish_reason") == "stop"


@dataclass(slots=True)
class Payer:
    """Pays in at the fake Stripe, whose webhooks go to whichever node lives."""

    cluster: Cluster
    sessions: Sessions
    payments: Payments
    fake: FakeStripe
    organization_id: str
    client: httpx.AsyncClient
    random: random.Random
    num_paid: int = 0
    refunded_cents: int = 0

    async def live(self, is_over: asyncio.Event) -> None:
        """A top-up every other second, and sometimes a part of it back."""
        pump = Pump(self.fake, self._deliver, seed=self.random.randint(0, 10**6))
        while not is_over.is_set():
            await asyncio.sleep(TOPUP_EVERY_S)
            key = new_id("click")
            while not await self._pay(key):
                await asyncio.sleep(0.2)
            if self.random.random() < 0.2:
                paid = self.fake.state.all("charge")[-1]
                cents = self.random.randint(1, 500)
                self.fake.state.refund(paid["payment_intent"], cents)
                self.refunded_cents += cents
            await pump.pump()

    async def _pay(self, key: str) -> bool:
        """The same key until it is done: a payment page is opened once, whatever fails."""
        try:
            async with self.sessions.begin() as session:
                topup = await topups.start(
                    session, self.organization_id, amount_cents=TOPUP_CENTS, idempotency_key=key
                )
            assert topup is not None
            await topups.open_checkout(
                self.sessions,
                self.payments,
                topup.id,
                email="chaos@example.com",
                is_card_saved=False,
                pages=ReturnPages("http://us/success", "http://us/cancel"),
            )
            async with read_only(self.sessions) as session:
                session_id = (await session.get_one(Topup, topup.id)).session_id
        except (OperationalError, PaymentsUnavailable):
            return False
        assert session_id is not None
        assert self.fake.pay_session(session_id, GOOD) is None
        self.num_paid += 1
        return True

    async def _deliver(self, payload: bytes, signature: str) -> None:
        url = self.cluster.origin(self.random.choice(NODES)) + "/v1/webhooks/stripe"
        try:
            await self.client.post(url, content=payload, headers={"stripe-signature": signature})
        except httpx.HTTPError:
            return  # the sweep will fetch it
