"""Everything that moves money, in any order, against an oracle that shares no code with billing.

Holds are in `machine_of_holds`, prices, budgets and gifts in `machine_of_terms`; here are the
customer, their bank and Stripe: top-ups, refunds, disputes and automatic recharge. What they do is
heard of by webhooks (in order or not, twice or never) or by the sweep, while commits fail and
answers of Stripe are lost.

`--hypothesis-profile=long` looks for hours (`make test-books`).
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from accounts.models import ApiKey, Organization, Project
from billing import disputes, holds, payment_profiles, recharge, refunds
from billing.errors import RefundTooLarge
from billing.models import Balance
from billing.payment_models import Refund
from common.clock import to_datetime
from common.db import create_engine, create_sessions
from tests.billing.books_under_test import (
    ORGANIZATION,
    amounts,
    fault_lists,
    positions,
    single_faults,
)
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.fake_stripe.state import DECLINED, GOOD, NEEDS_OWNER, SLOW, Object
from tests.billing.faults import Fault
from tests.billing.machine_of_holds import MachineOfHolds
from tests.billing.oracle import KEYS, PROJECT
from tests.billing.payment_oracle import CENT, OracleDispute, OraclePayment, OracleRefund
from tests.billing.payments import fake, running_stripe
from tests.conftest import SHARED_MEMORY, postgresql_copy

__all__ = ["fake", "running_stripe"]

cents = st.integers(500, 1_200)
news = st.sampled_from(["webhooks", "hostile webhooks", "sweep"])
stripe_faults = st.lists(st.sampled_from(["", "down", "lost"]), max_size=2)
OUTCOMES = {"pays": GOOD, "declined": DECLINED, "owner": NEEDS_OWNER}


class BooksMachine(MachineOfHolds):
    def __init__(self) -> None:
        super().__init__()
        self.intents: list[Object] = []
        """Of `self.payments.payments`, in the same order."""
        self.slow_sessions: dict[int, Object] = {}

    @initialize(credit=amounts, cents=cents)
    def begin(self, credit: int, cents: int) -> None:
        """A gift, and a payment with a card that is saved."""
        self.open_books(credit)
        self.top_up(cents=cents, card=GOOD, how="webhooks", planned=[], lost=[])

    def before_the_end(self) -> None:
        if self.gateway:
            self.hear("sweep", [])

    def hear(self, how: str, planned: list[Fault | None], lost: tuple[str, ...] = ()) -> None:
        """Bring home what happened at Stripe."""
        self.fake.faults.extend(lost)

        async def bring_home() -> None:
            if how != "sweep":
                await self.desk.pump.pump(is_adversarial=how == "hostile webhooks")
            if how == "webhooks":
                await self.desk.process()
            else:
                await self.desk.sweep()

        self.suffer(planned, bring_home)
        self.fake.faults.clear()
        self.suffer([], self.desk.sweep)
        self.payments.hear()

    def paid_payment(self, position: int) -> tuple[OraclePayment, Object]:
        found = [
            pair
            for pair in zip(self.payments.payments, self.intents, strict=True)
            if pair[0].is_paid
        ]
        return found[position % len(found)]

    @property
    def has_paid(self) -> bool:
        return any(payment.is_paid for payment in self.payments.payments)

    @rule(
        cents=cents,
        card=st.sampled_from([GOOD, GOOD, GOOD, SLOW, DECLINED]),
        how=st.sampled_from(["webhooks", "hostile webhooks", "sweep", "not yet"]),
        planned=fault_lists,
        lost=stripe_faults,
    )
    def top_up(
        self, cents: int, card: str, how: str, planned: list[Fault | None], lost: list[str]
    ) -> None:
        """Our page, Stripe's page, and the way back, or not yet."""
        key = self.next_id("click")
        self.fake.faults.extend(lost)
        topup = self.suffer(
            planned, lambda: self.desk.open_checkout(cents, key=key, is_card_saved=True)
        )
        self.fake.faults.clear()
        if self.fake.pay_session(topup.session_id, card) is None:
            session = self.fake.state.find(topup.session_id, "checkout.session")
            self.payments.payments.append(OraclePayment(cents, is_paid=card == GOOD))
            self.intents.append(self.fake.state.find(session["payment_intent"], "payment_intent"))
            if card == SLOW:
                self.slow_sessions[len(self.intents) - 1] = session
        if how != "not yet":
            self.hear(how, planned, tuple(lost))

    @precondition(lambda self: self.slow_sessions)
    @rule(is_paid=st.booleans(), how=news, planned=fault_lists)
    def a_slow_payment_ends(self, is_paid: bool, how: str, planned: list[Fault | None]) -> None:
        position, session = self.slow_sessions.popitem()
        self.fake.state.settle_slow_payment(session, is_paid=is_paid)
        self.payments.payments[position].is_paid = is_paid
        self.hear(how, planned)

    @precondition(lambda self: self.has_paid)
    @rule(position=positions, part=st.integers(1, 1_200), how=news, planned=fault_lists)
    def refund_at_stripe(
        self, position: int, part: int, how: str, planned: list[Fault | None]
    ) -> None:
        """By hand, in Stripe's dashboard: it may bring the balance below zero."""
        payment, intent = self.paid_payment(position)
        is_refused = payment.dispute is not None and payment.dispute.end != "won"
        if is_refused or not payment.left:
            return
        part = 1 + part % payment.left
        self.fake.state.refund(intent["id"], part)
        payment.refunds.append(OracleRefund(part))
        self.hear(how, planned)

    @precondition(lambda self: self.has_paid)
    @rule(
        position=positions,
        part=st.integers(1, 1_200),
        is_before=st.booleans(),
        planned=fault_lists,
        lost=stripe_faults,
    )
    def refund_here(
        self,
        position: int,
        part: int,
        is_before: bool,
        planned: list[Fault | None],
        lost: list[str],
    ) -> None:
        """An operator asks: never more than is left of the payment and of the credit."""
        self.hear("webhooks", [])
        payment, intent = self.paid_payment(position)
        dispute = payment.dispute
        is_too_much = part > payment.left or part * CENT > self.oracle.available
        is_disputed = dispute is not None and dispute.is_away

        async def ask() -> Refund:
            async with self.sessions.begin() as session:
                return await refunds.request(
                    session,
                    intent["metadata"]["topup_id"],
                    amount_cents=part,
                    reason="asked",
                    actor="machine",
                    clock=self.clock,
                )

        if is_too_much or is_disputed:
            with pytest.raises(RefundTooLarge):
                self.run(ask())
            return
        refund = self.suffer(["before"] if is_before else [], ask)
        has_failed = dispute is not None and dispute.end != "won"  # Stripe refuses that
        payment.refunds.append(OracleRefund(part, has_failed=has_failed))
        self.fake.faults.extend(lost)
        self.suffer(
            planned,
            lambda: refunds.send(self.sessions, self.desk.payments, refund.id, clock=self.clock),
        )
        self.fake.faults.clear()
        self.payments.hear()

    @precondition(lambda self: self.fake.state.all("refund"))
    @rule(position=positions, how=news, planned=fault_lists)
    def a_refund_fails(self, position: int, how: str, planned: list[Fault | None]) -> None:
        """The card is gone: Stripe has the money again, and so must the customer."""
        self.hear("webhooks", [])
        at_stripe = [r for r in self.fake.state.all("refund") if r["status"] == "succeeded"]
        if not at_stripe:
            return
        refund = at_stripe[position % len(at_stripe)]
        number = [intent["id"] for intent in self.intents].index(refund["payment_intent"])
        mine = self.payments.payments[number].refunds
        same = next(r for r in mine if r.cents == refund["amount"] and not r.has_failed)
        self.fake.state.fail_refund(refund)
        same.has_failed = True
        self.hear(how, planned)

    @precondition(lambda self: self.has_paid)
    @rule(position=positions, is_inquiry=st.booleans(), how=news, planned=fault_lists)
    def dispute(
        self, position: int, is_inquiry: bool, how: str, planned: list[Fault | None]
    ) -> None:
        """Freezes, unless it is only an inquiry."""
        payment, intent = self.paid_payment(position)
        if payment.dispute is not None:
            return
        self.fake.state.open_dispute(intent["id"], is_inquiry=is_inquiry)
        payment.dispute = OracleDispute(is_inquiry)
        self.hear(how, planned)

    @precondition(lambda self: any(not dispute.end for dispute in self.payments.disputes))
    @rule(is_won=st.booleans(), how=news, planned=fault_lists)
    def a_dispute_ends(self, is_won: bool, how: str, planned: list[Fault | None]) -> None:
        payment = next(p for p in self.payments.payments if p.dispute and not p.dispute.end)
        intent = self.intents[self.payments.payments.index(payment)]
        at_stripe = next(
            d for d in self.fake.state.all("dispute") if d["payment_intent"] == intent["id"]
        )
        assert payment.dispute is not None
        if payment.dispute.is_inquiry:
            payment.dispute.end, status = "closed", "warning_closed"
        else:
            payment.dispute.end = status = "won" if is_won else "lost"
        self.fake.state.close_dispute(at_stripe, status)
        self.hear(how, planned)

    @precondition(lambda self: self.oracle.is_frozen)
    @rule()
    def release(self) -> None:
        async def decide() -> None:
            async with self.sessions.begin() as session:
                await disputes.release(session, ORGANIZATION, reason="known", actor="machine")

        self.run(decide())
        self.payments.release()

    @precondition(lambda self: self.has_paid and not self.oracle.is_frozen)
    @rule(cents=cents, threshold=st.integers(1, 2_000), times=st.integers(1, 3))
    def switch_recharge_on(self, cents: int, threshold: int, times: int) -> None:
        self.hear("webhooks", [])
        if self.oracle.is_frozen:
            return

        async def change() -> None:
            async with self.sessions.begin() as session:
                await payment_profiles.set_recharge(
                    session,
                    ORGANIZATION,
                    is_on=True,
                    threshold_cents=threshold,
                    amount_cents=cents,
                    month_cap_cents=times * cents,
                    clock=self.clock,
                )

        self.run(change())
        mine = self.payments.recharge
        mine.is_on, mine.failures = True, 0
        mine.threshold, mine.cents, mine.cap = threshold * CENT, cents, times * cents

    @precondition(lambda self: self.payments.recharge.is_on)
    @rule(
        outcome=st.sampled_from(["pays", "pays", "pays", "declined", "owner"]),
        fault=single_faults,
        lost=st.sampled_from(["", "down", "lost"]),
    )
    def recharge_by_itself(self, outcome: str, fault: Fault | None, lost: str) -> None:
        """At once, and again half a minute later, when what was left open is tried again."""
        self.hear("webhooks", [])
        month = to_datetime(self.now).strftime("%Y-%m")
        for method in self.fake.state.cards:
            self.fake.state.cards[method] = OUTCOMES[outcome]
        if fault is not None:
            self.faults.append(fault)
        elif lost:
            self.fake.faults.append(lost)

        async def charge_due() -> None:
            with suppress(OperationalError):
                await recharge.run_due(self.sessions, self.desk.payments, clock=self.clock)

        self.run(charge_due())
        self.desk.pass_time(31)
        self.faults.clear()
        self.fake.faults.clear()
        self.run(charge_due())
        self.payments.run_recharge(month, outcome)
        if len(self.payments.payments) > len(self.intents):
            paid = [i for i in self.fake.state.all("payment_intent") if i["status"] == "succeeded"]
            self.intents.append(paid[-1])
        self.desk.pass_time(120)


@contextmanager
def copied_sqlite(template: Path) -> Iterator[str]:
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="nc-books-", dir=root) as directory:
        shutil.copyfile(template, Path(directory) / "books.sqlite3")
        yield f"sqlite+aiosqlite:///{directory}/books.sqlite3"


async def populate(url: str) -> None:
    """One organization without credit, its keys and a project."""
    engine = create_engine(url)
    async with create_sessions(engine).begin() as session:
        session.add(Organization(id=ORGANIZATION, name="m", status="active", created_at=0))
        await session.flush()
        session.add(Balance(organization_id=ORGANIZATION, posted_nano_usd=0, held_nano_usd=0))
        session.add(Project(id=PROJECT, organization_id=ORGANIZATION, name="p", created_at=0))
        await session.flush()
        for key, project in KEYS.items():
            if key is not None:
                values = {"name": "k", "mac": key, "pepper_version": 1, "last4": "last"}
                values |= {"prefix": key, "scopes": "inference", "created_at": 0}
                session.add(
                    ApiKey(id=key, organization_id=ORGANIZATION, project_id=project, **values)
                )
    await engine.dispose()


def explore(
    new_database: Callable[[], AbstractContextManager[str]],
    fake: FakeStripe,
    monkeypatch: pytest.MonkeyPatch,
    max_examples: int,
) -> None:
    is_long = settings.get_current_profile_name() == "long"
    monkeypatch.setattr(holds, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(BooksMachine, "new_database", staticmethod(new_database), raising=False)
    monkeypatch.setattr(BooksMachine, "fake", fake, raising=False)
    run_state_machine_as_test(
        BooksMachine,
        settings=settings(
            max_examples=settings().max_examples if is_long else max_examples,
            stateful_step_count=60 if is_long else 30,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_the_books_agree_with_the_oracle_whatever_happens_on_sqlite(
    sqlite_url: str, tmp_path: Path, fake: FakeStripe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(populate(sqlite_url))
    template = tmp_path / "ncompass.sqlite3"
    explore(lambda: copied_sqlite(template), fake, monkeypatch, 8)


@pytest.mark.slow
def test_the_books_agree_with_the_oracle_whatever_happens_on_postgresql(
    postgresql_url: str,
    postgresql_database_url: str,
    fake: FakeStripe,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asyncio.run(populate(postgresql_database_url))
    template = make_url(postgresql_database_url).database or ""
    explore(lambda: postgresql_copy(postgresql_url, template), fake, monkeypatch, 3)
