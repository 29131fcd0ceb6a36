"""Any order of holds, faults, dead gateways and adjustments, against an independent oracle.

A nearly empty balance is the normal case; commits fail before and after they are durable.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.exc import OperationalError

from accounts.models import ApiKey, Organization
from billing import chart, holds, ledger, sweeps
from billing.errors import (
    HoldExceeded,
    HoldFenced,
    HoldNotFound,
    InsufficientCredit,
    LedgerUnavailable,
)
from billing.gateways import GatewayLease
from billing.holds import AdmitHold, HoldWriter, SettleHold
from billing.ledger import Posting
from billing.models import Price
from billing.reconcile import Check, reconcile
from common.db import create_engine, create_sessions, read_only
from tests.billing.faults import Fault, Faults
from tests.billing.oracle import CACHED, INPUT, OUTPUT, Oracle, OracleHold, price_of

ORGANIZATION = "org_machine"
SHARED_MEMORY = Path("/dev/shm")
ROUGHLY_ONE_REQUEST = 50_000

faults = st.sampled_from([None, None, None, "before", "after"])
amounts = st.integers(1, 4 * ROUGHLY_ONE_REQUEST)
prompts = st.integers(0, 8)
tokens = st.integers(1, 5)
positions = st.integers(0, 10)


class BooksMachine(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self.directory = Path(tempfile.mkdtemp(prefix="nc-books-", dir=root))
        path = self.directory / "books.sqlite3"
        shutil.copyfile(self.template, path)
        self.runner = asyncio.Runner()
        self.engine = create_engine(f"sqlite+aiosqlite:///{path}")
        self.faults = Faults()
        self.sessions = self.faults.sessions(self.engine)
        self.oracle = Oracle()
        self.counter = 0
        self.gateway = ""

    @initialize(credit=st.integers(0, 4 * ROUGHLY_ONE_REQUEST))
    def open_books(self, credit: int) -> None:
        self.run(self.begin_gateway())
        if credit:
            self.give(credit, is_paid=False, fault=None)

    def teardown(self) -> None:
        async def close() -> list[Check]:
            if self.gateway:
                await self.writer.stop()
            async with read_only(self.sessions) as session:
                failed = [check for check in await reconcile(session) if not check.is_ok]
            await self.engine.dispose()
            return failed

        failed = self.run(close())
        self.runner.close()
        shutil.rmtree(self.directory)
        assert failed == []

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    async def begin_gateway(self) -> None:
        self.gateway = self.next_id("gw")
        await GatewayLease(self.sessions, self.gateway).renew()
        self.writer = HoldWriter(self.sessions)
        await self.writer.start()

    def next_id(self, prefix: str) -> str:
        self.counter += 1
        return f"{prefix}_{self.counter:03}"

    def pick(self, position: int) -> tuple[str, OracleHold]:
        return self.open_holds[position % len(self.open_holds)]

    @property
    def open_holds(self) -> list[tuple[str, OracleHold]]:
        return [item for item in self.oracle.holds.items() if item[1].is_open]

    def admission(self, prompt: int, per_choice: int, num_choices: int) -> AdmitHold:
        return AdmitHold(
            request_id=self.next_id("req"),
            organization_id=ORGANIZATION,
            api_key_id="key_machine",
            model="m",
            price_id="price_machine",
            gateway=self.gateway,
            input_tokens=prompt,
            output_tokens=per_choice * num_choices,
            num_choices=num_choices,
        )

    @precondition(lambda self: self.oracle.available > 0)
    @rule(wishes=st.lists(st.tuples(prompts, tokens, st.integers(1, 3)), min_size=1, max_size=4))
    def admit_together(self, wishes: list[tuple[int, int, int]]) -> None:
        """They share a transaction, and each sees what the ones before it have taken."""
        admits = [self.admission(*wish) for wish in wishes]

        async def admit_all() -> list[Any]:
            return await asyncio.gather(*map(self.writer.admit, admits), return_exceptions=True)

        for admit, result in zip(admits, self.run(admit_all()), strict=True):
            fitting = self.oracle.fitting(
                admit.input_tokens, admit.output_tokens, admit.num_choices
            )
            if fitting is None:
                assert isinstance(result, InsufficientCredit)
                continue
            assert result.authorized_output_tokens == fitting
            assert result.amount_nano_usd == price_of(admit.input_tokens, 0, fitting)
            self.oracle.holds[admit.request_id] = OracleHold(admit.input_tokens, fitting)
            assert self.oracle.available >= 0
            assert self.run(self.writer.admit(admit)) == result

    @precondition(lambda self: self.oracle.available > ROUGHLY_ONE_REQUEST // 2)
    @rule(prompt=prompts, per_choice=tokens, fault=st.sampled_from(["before", "after"]))
    def admit_without_an_answer(self, prompt: int, per_choice: int, fault: Fault) -> None:
        """The caller cannot know, so the writer itself takes back what may have been held."""
        admit = self.admission(prompt, per_choice, 1)
        fitting = self.oracle.fitting(prompt, per_choice, 1)
        self.faults.planned.append(fault)
        with pytest.raises(LedgerUnavailable):
            self.run(self.writer.admit(admit))
        with pytest.raises(HoldNotFound):  # the queue is in order: this comes after the void
            self.run(self.writer.void("req_none", 1, "aborted"))
        if fitting is not None and fault == "after":
            self.oracle.holds[admit.request_id] = OracleHold(prompt, fitting, charge=0)

    @precondition(lambda self: self.open_holds)
    @rule(position=positions, more=st.integers(0, 15), fault=faults)
    def extend(self, position: int, more: int, fault: Fault | None) -> None:
        request_id, hold = self.pick(position)
        target = hold.authorized + more
        is_covered = price_of(hold.prompt, 0, target) - hold.amount <= self.oracle.available
        if fault is not None:
            self.faults.planned.append(fault)
            with pytest.raises(LedgerUnavailable):
                self.run(self.writer.extend(request_id, 1, target))
        if more and not is_covered:
            with pytest.raises(InsufficientCredit):
                self.run(self.writer.extend(request_id, 1, target))
            return
        extended = self.run(self.writer.extend(request_id, 1, target))
        hold.authorized = target
        assert extended.authorized_output_tokens == target
        assert extended.amount_nano_usd == hold.amount

    @precondition(lambda self: self.open_holds)
    @rule(position=positions, data=st.data(), fault=faults)
    def settle(self, position: int, data: st.DataObject, fault: Fault | None) -> None:
        request_id, hold = self.pick(position)
        cached = data.draw(st.integers(0, hold.prompt))
        output = data.draw(st.integers(0, hold.authorized))
        settle = SettleHold(request_id, 1, hold.prompt - cached, cached, output, "completed")
        too_much = SettleHold(request_id, 1, hold.prompt, 0, hold.authorized + 1, "completed")
        with pytest.raises(HoldExceeded):
            self.run(self.writer.settle(too_much))
        self.faults.planned += [fault, fault]
        settlement = self.run(self.writer.settle(settle))
        self.faults.planned.clear()
        self.oracle.close(request_id, price_of(hold.prompt - cached, cached, output))
        assert settlement.charge_nano_usd == hold.charge
        assert settlement.available_nano_usd == self.oracle.available
        assert self.run(self.writer.settle(settle)) == settlement

    @precondition(lambda self: self.open_holds)
    @rule(position=positions, fault=faults)
    def void(self, position: int, fault: Fault | None) -> None:
        request_id, _ = self.pick(position)
        for planned in ([fault], []):
            self.faults.planned += planned
            settlement = self.run(self.writer.void(request_id, 1, "platform_fault"))
            self.faults.planned.clear()
            assert settlement.charge_nano_usd == 0
        self.oracle.close(request_id, 0)

    @precondition(lambda self: len(self.open_holds) > 3)
    @rule()
    def gateway_dies(self) -> None:
        """Its holds come free; it wakes up again and finds itself fenced."""
        zombie, lost_gateway = self.writer, self.gateway

        async def die() -> None:
            await GatewayLease(self.sessions, lost_gateway).release()
            for _ in range(2):
                await sweeps.close_all_lost(self.sessions)
            await self.begin_gateway()

        self.run(die())
        for request_id, hold in self.open_holds:
            self.oracle.close(request_id, 0)
            with pytest.raises(HoldFenced):
                self.run(zombie.extend(request_id, 1, hold.authorized + 1))
            with pytest.raises(HoldFenced):
                self.run(zombie.settle(SettleHold(request_id, 1, 0, 0, 0, "completed")))
        self.run(zombie.stop())

    @rule(amount=amounts, is_paid=st.booleans(), fault=faults)
    def give(self, amount: int, is_paid: bool, fault: Fault | None) -> None:
        contra = chart.ADJUSTMENTS if is_paid else chart.PROMOTIONAL_EXPENSE
        self.post(amount, contra, "paid" if is_paid else "promotional", fault)
        self.oracle.give(amount, is_paid)

    @precondition(lambda self: self.oracle.posted > 0)
    @rule(amount=st.integers(1, ROUGHLY_ONE_REQUEST // 2), fault=faults)
    def take(self, amount: int, fault: Fault | None) -> None:
        """An operator may take more than is there; what is held stays held."""
        self.post(-amount, chart.ADJUSTMENTS, "paid", fault)
        self.oracle.take(amount)

    def post(self, amount: int, contra: str, lot_kind: Any, fault: Fault | None) -> None:
        key = self.next_id("key")

        async def post_once() -> None:
            async with self.sessions() as session:
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
                    lot_kind=lot_kind,
                )
                await session.commit()

        self.faults.planned.append(fault)
        if fault is not None:
            with pytest.raises(OperationalError):
                self.run(post_once())
        self.run(post_once())
        self.run(post_once())

    @invariant()
    def books_are_what_the_oracle_says(self) -> None:
        async def look() -> None:
            async with read_only(self.sessions) as session:
                balance = await ledger.balance(session, ORGANIZATION)
                assert balance.posted == self.oracle.posted
                assert balance.held == self.oracle.held
                assert balance.promotional == self.oracle.free
                assert balance.available == self.oracle.available

        if self.gateway:
            self.run(look())


@pytest.fixture
async def template(sqlite_url: str, tmp_path: Path) -> Path:
    """A database with one organization without credit, a key and a price."""
    engine = create_engine(sqlite_url)
    async with create_sessions(engine).begin() as session:
        session.add(Organization(id=ORGANIZATION, name="m", status="active", created_at=0))
        await session.flush()
        session.add(
            ApiKey(
                id="key_machine",
                organization_id=ORGANIZATION,
                name="k",
                prefix="p",
                mac="m",
                pepper_version=1,
                last4="last",
                scopes="inference",
                created_at=0,
            )
        )
        session.add(
            Price(
                id="price_machine",
                model="m",
                valid_from=0,
                input_nano_usd_per_million=int(INPUT * 10**6),
                cached_input_nano_usd_per_million=int(CACHED * 10**6),
                output_nano_usd_per_million=int(OUTPUT * 10**6),
                created_at=0,
            )
        )
    await engine.dispose()
    return tmp_path / "ncompass.sqlite3"


def test_the_books_agree_with_the_oracle_whatever_happens(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(BooksMachine, "template", template, raising=False)
    run_state_machine_as_test(
        BooksMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
