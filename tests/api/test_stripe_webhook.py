"""The endpoint that Stripe posts to: signed bytes in, a row out."""

import json
from typing import Any

from sqlalchemy import select

from billing.payment_models import StripeEvent
from common.db import read_only
from tests.api.conftest import Platform
from tests.billing.fake_stripe.pump import signed

PATH = "/v1/webhooks/stripe"


def an_event(event_id: str = "evt_1") -> dict[str, Any]:
    return {"id": event_id, "type": "payment_intent.succeeded", "data": {"object": {"id": "pi_1"}}}


async def test_a_signed_event_is_stored_once_and_answered(platform: Platform) -> None:
    body, header = signed(an_event())
    for _ in range(2):
        response = await platform.client.post(
            PATH, content=body, headers={"stripe-signature": header}
        )
        assert (response.status_code, response.json()) == (200, {"received": True})
    async with read_only(platform.services.sessions) as session:
        (event,) = (await session.scalars(select(StripeEvent))).all()
    assert (event.object_id, event.processed_at) == ("pi_1", None)


async def test_what_stripe_did_not_sign_is_refused(platform: Platform) -> None:
    body, header = signed(an_event())
    tampered = json.dumps(an_event() | {"type": "customer.deleted"}).encode()
    for payload, signature in ((tampered, header), (body, ""), (b"", header)):
        response = await platform.client.post(
            PATH, content=payload, headers={"stripe-signature": signature}
        )
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "payment_mismatch"
    async with read_only(platform.services.sessions) as session:
        assert (await session.scalars(select(StripeEvent))).all() == []
