"""Delivers webhooks as the world does: twice, late, out of order, sometimes never."""

import random
import time
from collections.abc import Awaitable, Callable

import stripe

from tests.billing.fake_stripe.server import FakeStripe, body_of
from tests.billing.fake_stripe.state import Object

WEBHOOK_SECRET = "whsec_of_the_tests"

Deliver = Callable[[bytes, str], Awaitable[None]]


def signed(event: Object, *, secret: str = WEBHOOK_SECRET, age_s: int = 0) -> tuple[bytes, str]:
    body = body_of(event)
    timestamp = int(time.time()) - age_s
    header = stripe.WebhookSignature.generate_signature_header(body.decode(), secret, timestamp)
    return body, header


class Pump:
    """Sends each event of a fake Stripe at most once more than it should, in a random order."""

    def __init__(self, fake: FakeStripe, deliver: Deliver, *, seed: int = 0) -> None:
        self._fake = fake
        self._deliver = deliver
        self._random = random.Random(seed)
        self._sent = 0

    async def pump(self, *, is_adversarial: bool = True) -> None:
        """Deliver what is new. Adversarial: shuffled, a half of it twice, a quarter of it never."""
        new = self._fake.state.events[self._sent :]
        self._sent += len(new)
        if is_adversarial:
            twice = [event for event in new if self._random.random() < 0.5]
            new = [event for event in new if self._random.random() < 0.75] + twice
            self._random.shuffle(new)
        for event in new:
            await self._deliver(*signed(event))
