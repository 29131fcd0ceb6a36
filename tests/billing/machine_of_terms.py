"""What requests are held and charged by: prices, budgets, gifts that may end, and time."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from billing import budgets, chart, expiry, ledger, pricing
from billing.errors import (
    InvalidPrice,
)
from billing.ledger import Posting
from tests.billing.books_under_test import (
    DAY,
    MODEL,
    ORGANIZATION,
    BooksUnderTest,
    amounts,
    fault_lists,
    positions,
)
from tests.billing.faults import Fault
from tests.billing.oracle import SECOND, OracleBudget, OraclePrice

scopes = st.sampled_from(["key_a", "key_b", "project"])


def price_per_million(scale: int) -> dict[str, int]:
    """Dollars a token, and odd fractions of a nano-dollar, so that rounding shows."""
    return {"input": scale * 10**14 + 123, "cached": 500_001, "output": scale * 3 * 10**14 + 333}


class MachineOfTerms(BooksUnderTest):
    def open_books(self, credit: int) -> None:
        super().open_books(credit)
        self.set_price(2)
        self.give(credit, None, [])

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
