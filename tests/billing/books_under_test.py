"""Real tables on a database of their own, the oracle beside them, and commits that fail.

What every state machine of the books is built on. A nearly empty balance is the normal case: a
request costs a few dollars, and so does a gift.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant
from sqlalchemy.exc import OperationalError

from billing import budgets, ledger
from billing.errors import (
    PaymentsUnavailable,
)
from billing.gateways import GatewayLease
from billing.holds import HoldWriter
from common.db import create_engine, create_sessions, read_only
from tests.billing.fake_stripe.server import FakeStripe
from tests.billing.faults import Fault, plan_faults
from tests.billing.oracle import Oracle
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
positions = st.integers(0, 10)


class BooksUnderTest(RuleBasedStateMachine):
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
        self.desk = self.run(self.set_up_desk())
        self.clock = self.desk.clock
        self.oracle = Oracle()
        self.payments = OraclePayments(self.oracle)
        self.counter = 0
        self.gateway = ""

    async def set_up_desk(self) -> Desk:
        desk = Desk(self.sessions, ORGANIZATION, Payments(settings_of(self.fake)), self.fake)
        desk.now_us = NEARLY_MIDNIGHT
        return desk

    def open_books(self, credit: int) -> None:
        """A gateway; the machines add what they need."""
        self.run(self.begin_gateway())

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
