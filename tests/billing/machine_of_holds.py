"""Any order of holds, faults and dead gateways, beside the oracle."""

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from accounts.errors import OrganizationFrozen
from billing import pricing, sweeps
from billing.errors import (
    BudgetExceeded,
    HoldExceeded,
    HoldFenced,
    HoldNotFound,
    InsufficientCredit,
    LedgerUnavailable,
)
from billing.gateways import GatewayLease
from billing.holds import AdmitHold, SettleHold
from billing.models import Price
from common.db import read_only
from tests.billing.books_under_test import (
    MODEL,
    ORGANIZATION,
    ROUGHLY_ONE_REQUEST,
    positions,
    single_faults,
)
from tests.billing.faults import Fault
from tests.billing.machine_of_terms import MachineOfTerms
from tests.billing.oracle import KEYS, OracleHold

prompts, tokens = st.integers(0, 8), st.integers(1, 5)
keys = st.sampled_from(list(KEYS))
wishes_together = st.lists(
    st.tuples(keys, prompts, tokens, st.integers(1, 3)), min_size=1, max_size=4
)


class MachineOfHolds(MachineOfTerms):
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
