"""Any order of holds, faults, dead gateways, prices, budgets and gifts, beside the oracle.

The half of the machine that needs no Stripe. A nearly empty balance is the normal case: a request
costs a few dollars, and so does a gift. Commits fail before and after they are durable.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy.exc import OperationalError

from accounts.errors import OrganizationFrozen
from billing import budgets, chart, expiry, ledger, pricing, sweeps
from billing.errors import (
    BudgetExceeded,
    HoldExceeded,
    HoldFenced,
    HoldNotFound,
    InsufficientCredit,
    InvalidPrice,
    LedgerUnavailable,
    PaymentsUnavailable,
)
from billing.gateways import GatewayLease
from billing.holds import AdmitHold, HoldWriter, SettleHold
from billing.ledger import Posting
from billing.models import Price
from common.db import create_engine, create_sessions, read_only
from tests.billing.conftest import Books
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.faults import Fault, plan_faults
from tests.billing.oracle import KEYS, SECOND, Oracle, OracleBudget, OracleHold, OraclePrice
from tests.billing.payment_oracle import OraclePayments
from tests.billing.payments import Desk, Payments, settings_of

ORGANIZATION, MODEL = "org_machine", "m"
DAY = 86_400
NEARLY_MIDNIGHT = 1_793_485_800_000_000
"""2026-10-31 22:30 UTC: days and months end while the machine runs."""
ROUGHLY_ONE_REQUEST = 4_000_000_000

fault_lists = st.lists(st.sampled_from([None, None, None, "before", "after"]), max_size=3)
single_faults = st.sampled_from([None, None, None, "before", "after"])
amounts = st.builds(
    lambda halves, odd: halves * ROUGHLY_ONE_REQUEST // 2 + odd,
    st.integers(1, 6),
    st.integers(-9, 9),
)
prompts, tokens, positions = st.integers(0, 8), st.integers(1, 5), st.integers(0, 10)
keys = st.sampled_from(list(KEYS))
scopes = st.sampled_from(["key_a", "key_b", "project"])
wishes_together = st.lists(
    st.tuples(keys, prompts, tokens, st.integers(1, 3)), min_size=1, max_size=4
)


def price_per_million(scale: int) -> dict[str, int]:
    """Dollars a token, and odd fractions of a nano-dollar, so that rounding shows."""
    return {"input": scale * 10**14 + 123, "cached": 500_001, "output": scale * 3 * 10**14 + 333}


class MachineOfHolds(RuleBasedStateMachine):
    new_database: ClassVar[Callable[[], AbstractContextManager[str]]]
    fake: ClassVar[FakeStripe]

    def __init__(self) -> None:
        super().__init__()
        self.database = type(self).new_database()
        self.fake.reset()
        self.runner = asyncio.Runner()
        self.engine = create_engine(self.database.__enter__())
        self.faults = plan_faults(self.engine)
        self.sessions = create_sessions(self.engine)
        books = Books(self.sessions, None, "", None, None)  # type: ignore[arg-type]
        self.desk = self.run(self.set_up_desk(books))
        self.clock = self.desk.clock
        self.oracle = Oracle()
        self.payments = OraclePayments(self.oracle)
        self.counter = 0
        self.gateway = ""

    async def set_up_desk(self, books: Books) -> Desk:
        desk = Desk(books, ORGANIZATION, Payments(settings_of(self.fake)), self.fake)
        desk.now_us = NEARLY_MIDNIGHT
        return desk

    def open_books(self, credit: int) -> None:
        """A gateway, a price and a gift."""
        self.run(self.begin_gateway())
        self.set_price(2)
        self.give(credit, None, [])

    def teardown(self) -> None:
        self.faults.clear()
        self.fake.faults.clear()

        async def close() -> list[str]:
            if self.gateway:
                await self.writer.stop()
            failed = await self.desk.failed_checks()
            await self.desk.payments.close()
            await self.engine.dispose()
            return failed

        self.before_the_end()
        failed = self.run(close())
        self.runner.close()
        self.database.__exit__(None, None, None)
        assert failed == []

    def before_the_end(self) -> None:
        """What must happen so that the books meet Stripe's."""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def suffer(self, planned: list[Fault | None], work: Callable[[], Any]) -> Any:
        """Do `work` again until it succeeds; what it does must be the same as doing it once."""
        self.faults[:] = planned
        while True:
            try:
                result = self.run(work())
            except (OperationalError, PaymentsUnavailable):
                continue
            self.faults.clear()
            return result

    async def begin_gateway(self) -> None:
        self.gateway = self.next_id("gw")
        await GatewayLease(self.sessions, self.gateway).renew()
        self.writer = HoldWriter(self.sessions, clock=self.clock)
        await self.writer.start()

    def next_id(self, prefix: str) -> str:
        self.counter += 1
        return f"{prefix}_{self.counter:03}"

    @property
    def now(self) -> int:
        return self.desk.now_us

    @property
    def open_holds(self) -> list[tuple[str, OracleHold]]:
        return [item for item in self.oracle.holds.items() if item[1].is_open]

    def pick(self, position: int) -> tuple[str, OracleHold]:
        return self.open_holds[position % len(self.open_holds)]

    def price_id(self) -> str:
        async def find() -> Price:
            async with read_only(self.sessions) as session:
                return await pricing.current_price(session, MODEL, clock=self.clock)

        price: Price = self.run(find())
        return price.id

    def admission(self, key: str | None, prompt: int, per_choice: int, choices: int) -> AdmitHold:
        return AdmitHold(
            request_id=self.next_id("req"),
            organization_id=ORGANIZATION,
            api_key_id=key,
            model=MODEL,
            price_id=self.price_id(),
            gateway=self.gateway,
            input_tokens=prompt,
            output_tokens=per_choice * choices,
            num_choices=choices,
        )

    # --- holds

    @rule(wishes=wishes_together)
    def admit_together(self, wishes: list[tuple[str | None, int, int, int]]) -> None:
        """They share a transaction, and each sees what the ones before it have taken."""
        admits = [self.admission(*wish) for wish in wishes]

        async def admit_all() -> list[Any]:
            return await asyncio.gather(*map(self.writer.admit, admits), return_exceptions=True)

        for admit, result in zip(admits, self.run(admit_all()), strict=True):
            refusal, fitting = self.expected(admit)
            if refusal is not None:
                assert type(result) is refusal
                continue
            assert fitting is not None
            price = self.oracle.price(self.now)
            assert result.authorized_output_tokens == fitting
            assert result.amount_nano_usd == price.of(admit.input_tokens, 0, fitting)
            self.note(admit, fitting)
            assert self.oracle.available >= 0
            for scope, budget in self.oracle.budgets.items():
                if admit.api_key_id and scope in (admit.api_key_id, KEYS[admit.api_key_id]):
                    assert sum(self.oracle.standing(scope, self.now)) <= budget.limit
            assert self.run(self.writer.admit(admit)) == result

    def expected(self, admit: AdmitHold) -> tuple[type[Exception] | None, int | None]:
        if self.oracle.is_frozen:
            return OrganizationFrozen, None
        fitting = self.oracle.fitting(
            admit.api_key_id, admit.input_tokens, admit.output_tokens, admit.num_choices, self.now
        )
        _, is_budget = self.oracle.left_for(admit.api_key_id, self.now)
        if fitting is None:
            return (BudgetExceeded if is_budget else InsufficientCredit), None
        return None, fitting

    def note(self, admit: AdmitHold, fitting: int, **ended: int) -> None:
        self.oracle.holds[admit.request_id] = OracleHold(
            admit.api_key_id, self.oracle.price(self.now), admit.input_tokens, fitting, **ended
        )

    @precondition(lambda self: self.oracle.available > ROUGHLY_ONE_REQUEST // 2)
    @rule(key=keys, prompt=prompts, per_choice=tokens, fault=st.sampled_from(["before", "after"]))
    def admit_without_an_answer(
        self, key: str | None, prompt: int, per_choice: int, fault: Fault
    ) -> None:
        """The caller cannot know, so the writer itself takes back what may have been held."""
        admit = self.admission(key, prompt, per_choice, 1)
        _, fitting = self.expected(admit)
        self.faults.append(fault)
        with pytest.raises(LedgerUnavailable):
            self.run(self.writer.admit(admit))
        with pytest.raises(HoldNotFound):  # the queue is in order: this comes after the void
            self.run(self.writer.void("req_none", 1, "aborted"))
        if fitting is not None and fault == "after":
            self.note(admit, fitting, charge=0, closed_at=self.now)

    @precondition(lambda self: self.open_holds)
    @rule(position=positions, more=st.integers(0, 15), fault=single_faults)
    def extend(self, position: int, more: int, fault: Fault | None) -> None:
        request_id, hold = self.pick(position)
        target = hold.authorized + more
        left, is_budget = self.oracle.left_for(hold.key, self.now)
        refusal: type[Exception] | None = None
        if more and self.oracle.is_frozen:
            refusal = OrganizationFrozen
        elif more and hold.price.of(hold.prompt, 0, target) - hold.amount > left:
            refusal = BudgetExceeded if is_budget else InsufficientCredit
        if fault is not None:
            self.faults.append(fault)
            with pytest.raises(LedgerUnavailable):
                self.run(self.writer.extend(request_id, 1, target))
        if refusal is not None:
            with pytest.raises(refusal) as refused:
                self.run(self.writer.extend(request_id, 1, target))
            assert refused.type is refusal
            return
        extended = self.run(self.writer.extend(request_id, 1, target))
        hold.authorized = target
        assert extended.authorized_output_tokens == target
        assert extended.amount_nano_usd == hold.amount

    @precondition(lambda self: self.open_holds)
    @rule(position=positions, data=st.data(), fault=single_faults)
    def settle(self, position: int, data: st.DataObject, fault: Fault | None) -> None:
        request_id, hold = self.pick(position)
        cached = data.draw(st.integers(0, hold.prompt))
        output = data.draw(st.integers(0, hold.authorized))
        settle = SettleHold(request_id, 1, hold.prompt - cached, cached, output, "completed")
        too_much = SettleHold(request_id, 1, hold.prompt, 0, hold.authorized + 1, "completed")
        with pytest.raises(HoldExceeded):
            self.run(self.writer.settle(too_much))
        self.faults[:] = [fault, fault]
        settlement = self.run(self.writer.settle(settle))
        self.faults.clear()
        self.oracle.close(request_id, hold.price.of(hold.prompt - cached, cached, output), self.now)
        assert settlement.charge_nano_usd == hold.charge
        assert settlement.available_nano_usd == self.oracle.available
        assert self.run(self.writer.settle(settle)) == settlement

    @precondition(lambda self: self.open_holds)
    @rule(position=positions, fault=single_faults)
    def void(self, position: int, fault: Fault | None) -> None:
        request_id, _ = self.pick(position)
        for planned in ([fault], []):
            self.faults[:] = planned
            settlement = self.run(self.writer.void(request_id, 1, "platform_fault"))
            self.faults.clear()
            assert settlement.charge_nano_usd == 0
        self.oracle.close(request_id, 0, self.now)

    @precondition(lambda self: len(self.open_holds) > 3)
    @rule()
    def gateway_dies(self) -> None:
        """Its holds come free; it wakes up again and finds itself fenced."""
        zombie, lost_gateway = self.writer, self.gateway

        async def die() -> None:
            await GatewayLease(self.sessions, lost_gateway).release()
            for _ in range(2):
                await sweeps.close_all_lost(self.sessions, clock=self.clock)
            await self.begin_gateway()

        self.run(die())
        for request_id, hold in self.open_holds:
            self.oracle.close(request_id, 0, self.now)
            with pytest.raises(HoldFenced):
                self.run(zombie.extend(request_id, 1, hold.authorized + 1))
            with pytest.raises(HoldFenced):
                self.run(zombie.settle(SettleHold(request_id, 1, 0, 0, 0, "completed")))
        self.run(zombie.stop())

    # --- prices, budgets, gifts and time

    @rule(scale=st.integers(1, 4))
    def set_price(self, scale: int) -> None:
        """Running requests keep the price that they were admitted at."""

        async def change() -> None:
            async with self.sessions.begin() as session:
                await pricing.set_price(
                    session, MODEL, **price_per_million(scale), clock=self.clock
                )

        self.run(change())
        newest = max((price.valid_from for price in self.oracle.prices), default=0)
        self.add_price(scale, max(self.now, newest + 1))
        self.desk.pass_time(1)

    @rule(hours=st.sampled_from([2, 30]))
    def promote(self, hours: int) -> None:
        """A third of the price for some hours, and then today's again."""
        until, regular = self.now + hours * 3_600 * SECOND, self.oracle.price(self.now)
        has_later = any(price.valid_from > self.now for price in self.oracle.prices)

        async def change() -> None:
            async with self.sessions.begin() as session:
                await pricing.promote(
                    session, MODEL, **price_per_million(1), until=until, clock=self.clock
                )

        if has_later:
            with pytest.raises(InvalidPrice):
                self.run(change())
            return
        self.run(change())
        self.add_price(1, self.now)
        again = OraclePrice(until, regular.input, regular.cached, regular.output)
        self.oracle.prices.append(again)
        self.desk.pass_time(1)

    def add_price(self, scale: int, valid_from: int) -> None:
        amounts_ = price_per_million(scale)
        self.oracle.prices.append(OraclePrice.per_million(valid_from, **amounts_))

    @rule(
        scope=scopes,
        limit=amounts,
        period=st.sampled_from(["day", "month", "total"]),
    )
    def bound(self, scope: str, limit: int, period: budgets.Period) -> None:
        """It may be below what is spent already."""

        async def change() -> None:
            name = "project_id" if scope == "project" else "api_key_id"
            async with self.sessions.begin() as session:
                await budgets.set_budget(
                    session,
                    ORGANIZATION,
                    **{name: scope},
                    limit_nano_usd=limit,
                    period=period,
                    clock=self.clock,
                )

        self.run(change())
        self.oracle.budgets[scope] = OracleBudget(limit, period)

    @precondition(lambda self: self.oracle.budgets)
    @rule(position=positions)
    def unbound(self, position: int) -> None:
        scope = sorted(self.oracle.budgets)[position % len(self.oracle.budgets)]

        async def change() -> None:
            async with self.sessions.begin() as session:
                for budget, _ in await budgets.list_budgets(session, ORGANIZATION):
                    if scope in (budget.api_key_id, budget.project_id):
                        await budgets.remove_budget(session, ORGANIZATION, budget.id)

        self.run(change())
        del self.oracle.budgets[scope]

    @rule(seconds=st.sampled_from([7, 1_800, 3_600, 5 * 3_600, DAY]))
    def time_passes(self, seconds: int) -> None:
        self.desk.pass_time(seconds)

    @rule(amount=amounts, hours=st.sampled_from([None, 3, 30]), planned=fault_lists)
    def give(self, amount: int, hours: int | None, planned: list[Fault | None]) -> None:
        """A gift, perhaps one that ends."""
        ends_at = None if hours is None else self.now + hours * 3_600 * SECOND
        self.post(amount, chart.PROMOTIONAL_EXPENSE, planned, ends_at)
        self.oracle.give(amount, is_paid=False, ends_at=ends_at)

    @precondition(lambda self: self.oracle.posted > 0)
    @rule(amount=amounts, planned=fault_lists)
    def take(self, amount: int, planned: list[Fault | None]) -> None:
        """An operator may take more than is there; what is held stays held."""
        self.post(-amount, chart.ADJUSTMENTS, planned, None)
        self.oracle.take(amount)

    @rule(planned=fault_lists)
    def expire(self, planned: list[Fault | None]) -> None:
        """What running requests hold stays."""
        for faults in (planned, []):
            self.suffer(faults, lambda: expiry.sweep(self.sessions, clock=self.clock))
        self.oracle.expire(self.now)

    def post(
        self, amount: int, contra: str, planned: list[Fault | None], ends_at: int | None
    ) -> None:
        key = self.next_id("key")

        async def post_once() -> None:
            async with self.sessions.begin() as session:
                await ledger.post(
                    session,
                    key=key,
                    kind="adjustment",
                    organization_id=ORGANIZATION,
                    postings=[
                        Posting(chart.customer(ORGANIZATION), amount),
                        Posting(contra, -amount),
                    ],
                    actor="machine",
                    memo="machine",
                    lot_kind="promotional",
                    expires_at=ends_at,
                    clock=self.clock,
                )

        for faults in (planned, []):
            self.suffer(faults, post_once)

    @invariant()
    def books_are_what_the_oracle_says(self) -> None:
        async def look() -> None:
            async with read_only(self.sessions) as session:
                balance = await ledger.balance(session, ORGANIZATION)
                bounds = await budgets.list_budgets(session, ORGANIZATION, clock=self.clock)
            assert balance.posted == self.oracle.posted
            assert balance.held == self.oracle.held
            assert balance.promotional == self.oracle.free
            standings = {
                budget.api_key_id or budget.project_id or "": (
                    standing.spent_nano_usd,
                    standing.held_nano_usd,
                )
                for budget, standing in bounds
            }
            assert standings == {
                scope: self.oracle.standing(scope, self.now) for scope in self.oracle.budgets
            }

        if self.gateway:
            self.run(look())
