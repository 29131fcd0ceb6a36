"""Planted mistakes about money. Each names what it breaks and the tests that must notice."""

from tests.mutation import Mutant

HOLDS, LEDGER, MONEY = (f"tests/billing/test_{name}.py" for name in ("holds", "ledger", "money"))
BUDGETS, TOPUPS = (f"tests/billing/test_{name}.py" for name in ("budgets", "topups"))
EXTENSIONS, WATCH = (f"tests/billing/test_{name}.py" for name in ("extensions", "credit_watch"))
RETURNS, RECHARGE = "tests/billing/test_refunds_and_disputes.py", "tests/billing/test_recharge.py"
STATEMENTS, EXPIRY = "tests/billing/test_statements.py", "tests/billing/test_expiry.py"
EXPORTS = "tests/web/test_exports.py"
ASSUMPTIONS = "tests/billing/test_assumptions.py"


def _book(name: str, old: str, new: str, tests: str = HOLDS) -> Mutant:
    return Mutant(name, "billing/hold_book.py", old, new, tests)


def _of(module: str, tests: str, *changes: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(name, f"billing/{module}.py", old, new, tests) for name, old, new in changes]


ROUNDED_BY_TERM = """return NanoUsd(
        -(-uncached_input * price.input_nano_usd_per_million // TOKENS_PER_PRICE)
        - (-cached_input * price.cached_input_nano_usd_per_million // TOKENS_PER_PRICE)
        - (-output * price.output_nano_usd_per_million // TOKENS_PER_PRICE)
    )"""

RESEARCH = [
    _book("M1 no guard in admit", "    if fitting < least:", "    if False:"),
    _book(
        "M2 no guard in extend", "        if more > available and more > 0:", "        if False:"
    ),
    Mutant(
        "M3 a random idempotency key",
        "billing/book_writer.py",
        '"key": f"usage:{ended.hold.request_id}",',
        '"key": new_id("usage"),',
        "tests/billing/test_reconcile.py",
    ),
    Mutant(
        "M4 a repeated posting moves the balance",
        "billing/ledger.py",
        "        return await _replay(session, key, kind, organization_id, postings)",
        "        await _move_balance(session, organization_id, postings[0].amount_nano_usd)\n"
        "        return await _replay(session, key, kind, organization_id, postings)",
        LEDGER,
    ),
    _book(
        "M5 settle ignores the epoch",
        "        _require_epoch(hold, settle.epoch)\n        charge =",
        "        charge =",
    ),
    _book(
        "M6 settle is not idempotent",
        '        if hold.state != "open":\n            return self._repeat(hold, settle.epoch)\n',
        "",
    ),
    _book(
        "M7 frees what was charged instead of what was held",
        "posted=-closed.charge_nano_usd, held=-hold.amount_nano_usd",
        "posted=-closed.charge_nano_usd, held=-closed.charge_nano_usd",
    ),
    *_of(
        "money",
        MONEY,
        (
            "M8 cached input is billed twice",
            "uncached_input * price.input_nano_usd_per_million",
            "(uncached_input + cached_input) * price.input_nano_usd_per_million",
        ),
        (
            "M9 rounds each term",
            "return NanoUsd(-(-total // TOKENS_PER_PRICE))",
            ROUNDED_BY_TERM,
        ),
    ),
    _book(
        "M10 extend ignores the epoch",
        'if hold.state != "open" or hold.epoch != extend.epoch:',
        'if hold.state != "open":',
    ),
    _book(
        "M11 extends by an increment",
        "        hold.authorized_output_tokens = extend.output_tokens",
        "        hold.authorized_output_tokens += extend.output_tokens",
    ),
]

LOTS_AND_PRICES = [
    *_of(
        "money",
        MONEY,
        (
            "rounds down, so that a use may be free",
            "return NanoUsd(-(-total // TOKENS_PER_PRICE))",
            "return NanoUsd(total // TOKENS_PER_PRICE)",
        ),
    ),
    *_of(
        "lots",
        LEDGER,
        (
            "uses bought credit before the gift",
            "return (self.is_paid, expires_at",
            "return (not self.is_paid, expires_at",
        ),
    ),
    *_of(
        "ledger",
        LEDGER,
        (
            "new credit forgets the debt",
            "swallowed = amount - max(0, min(amount, posted))",
            "swallowed = 0",
        ),
    ),
    _book(
        "use of a gift is revenue",
        "unpaid = sum(part.amount_nano_usd for part in uses if not part.is_paid)",
        "unpaid = 0",
        LEDGER,
    ),
    *_of(
        "pricing",
        BUDGETS,
        (
            "a future price is charged now",
            ".where(Price.model == model, Price.valid_from <= clock())",
            ".where(Price.model == model)",
        ),
        (
            "a promotion never ends",
            "clock=lambda: until,",
            "clock=lambda: until * 2,",
        ),
    ),
]

BOUNDS = [
    _book("a budget is not asked", "        if left < available:", "        if False:", BUDGETS),
    _book(
        "requests of one group share a budget unseen",
        "            budget.held_nano_usd += amount",
        "            budget.held_nano_usd += 0",
        BUDGETS,
    ),
    *_of(
        "budgets",
        BUDGETS,
        (
            "a budget forgets what is held",
            "- self.spent_nano_usd - self.held_nano_usd",
            "- self.spent_nano_usd",
        ),
        (
            "a budget forgets what is spent",
            "- self.spent_nano_usd - self.held_nano_usd",
            "- self.held_nano_usd",
        ),
        ("a total begins anew every day", 'if period == "total":', "if False:"),
    ),
    *_of(
        "book_reader",
        BUDGETS,
        (
            "a key's budget bounds nothing",
            "    if key_period is not None:",
            "    if False:",
        ),
        (
            "a project's budget bounds nothing",
            "    if project_period is not None:",
            "    if False:",
        ),
    ),
    *_of(
        "book_reader",
        "tests/billing/test_extensions.py",
        (
            "an extension asks no key",
            "key_ids |= {hold.api_key_id for hold in _of(ExtendHold, operations, holds)}",
            "key_ids |= set()",
        ),
    ),
]

TOGETHER = [
    Mutant(
        "a transaction never begins",
        "common/round_trip.py",
        '        raw.execute("BEGIN IMMEDIATE")\n',
        "        pass\n",
        "tests/common/test_round_trip.py",
    ),
    Mutant(
        "a guarded update is not counted",
        "common/round_trip.py",
        "            changed += cursor.rowcount\n",
        "            changed += 1\n",
        "tests/common/test_round_trip.py",
    ),
    Mutant(
        "SQLite commits around a row that was missed",
        "common/round_trip.py",
        "        raise RowMissed\n",
        "        pass\n",
        "tests/common/test_round_trip.py",
    ),
    *_of(
        "holds",
        "tests/billing/test_writer.py",
        (
            "what a caller has hung up on before stays held",
            "            elif isinstance(waiting.operation, AdmitHold) and waiting.future.cancelled():",
            "            elif False:",
        ),
        (
            "what a caller has hung up on with the answer stays held",
            "        if not admitting.cancelled() and admitting.exception() is None:",
            "        if False:",
        ),
    ),
]

ASSUMED = [
    Mutant(
        "nothing is held against the assumptions",
        "billing/book_writer.py",
        "[*guards, *_calls(",
        "[*_calls(",
        ASSUMPTIONS,
    ),
    *_of(
        "assumptions",
        ASSUMPTIONS,
        ("an assumed key may be revoked", "        ApiKey.revoked_at.is_(None),\n", ""),
        (
            "an assumed key may be somebody else's",
            '        ApiKey.organization_id == bindparam("organization_id"),\n',
            "",
        ),
        (
            "an assumed key may have a budget",
            "        ~exists().where(Budget.api_key_id == ApiKey.id),\n",
            "",
        ),
        (
            "an assumed key's project may have a budget",
            "        ~exists().where(Budget.project_id == ApiKey.project_id),\n",
            "",
        ),
        (
            "an assumed key may have expired",
            'ApiKey.expires_at > bindparam("now_us")',
            "ApiKey.expires_at.is_not(None)",
        ),
        (
            "an assumed organization may be frozen",
            "        Organization.status == literal_column(\"'active'\"),\n",
            "",
        ),
    ),
]

RETURNED = [
    *_of(
        "refunds",
        RETURNS,
        (
            "refunds of one payment share a key",
            'key=f"re:{refund.id}", sign=-1',
            'key=f"re:{refund.topup_id}", sign=-1',
        ),
        (
            "a failed refund is kept",
            '    if refund.state == "failed":\n        return\n',
            "    if refund is not None:\n        return\n",
        ),
        (
            "more is refunded than was paid",
            "if not 0 < amount_cents <= left:",
            "if not 0 < amount_cents:",
        ),
        ("spent credit is refunded", "    if balance.available < 0:", "    if False:"),
        ("a refund takes the gift", "is_paid_used_first=True", "is_paid_used_first=False"),
        (
            "forged metadata claims a refund",
            "refund is not None and refund.topup_id == topup_id",
            "refund is not None",
        ),
    ),
    *_of(
        "disputes",
        RETURNS,
        ("a won dispute takes again", '("reinstated", 1)', '("reinstated", -1)'),
        ("an old view undoes a dispute's end", " or dispute.is_reinstated:", ":"),
        (
            "a dispute freezes nobody",
            "must_freeze = not dispute.status.startswith(INQUIRY)",
            "must_freeze = False",
        ),
        (
            "an inquiry freezes",
            "must_freeze = not dispute.status.startswith(INQUIRY) and",
            "must_freeze =",
        ),
        (
            "the first dispute won releases",
            "and not dispute.is_freezing and not others:",
            "and not dispute.is_freezing:",
        ),
    ),
]

PAID_IN = [
    *_of(
        "topups",
        TOPUPS,
        (
            "any amount is credited",
            "if any(amount != (topup.amount_cents",
            "if False and any(amount != (topup.amount_cents",
        ),
    ),
    *_of(
        "webhooks",
        TOPUPS,
        (
            "anybody may send webhooks",
            "    verify_signature(payload, signature,",
            "    (lambda *_: None)(payload, signature,",
        ),
        (
            "a failed event is thrown away",
            '{"error": error} if error',
            '{"error": error, "processed_at": 1} if error',
        ),
    ),
    *_of(
        "stripe_client",
        TOPUPS,
        ("an old webhook is good for ever", "header, secret, 300)", "header, secret, 0)"),
    ),
    *_of(
        "stripe_client",
        RECHARGE,
        ("a repeated charge has a new key", '{"idempotency_key": f"recharge:{topup_id}"}', "{}"),
    ),
    *_of(
        "recharge",
        RECHARGE,
        ("no pause between two recharges", "COOLDOWN_S = 60", "COOLDOWN_S = 0"),
        (
            "no limit a month",
            "if charged + profile.recharge_cents > profile.recharge_month_cap_cents:",
            "if False:",
        ),
        ("declines never switch it off", "profile.failed_recharges >= MAX_FAILURES", "False"),
        ("the bank's wish is ignored", "reason == AUTHENTICATION_REQUIRED or", ""),
    ),
    *_of(
        "statements",
        STATEMENTS,
        (
            "days are UTC days",
            "to_datetime(slot.start_us).astimezone(zone).date()",
            "to_datetime(slot.start_us).date()",
        ),
        (
            "no zone is off by a quarter",
            "US_PER_QUARTER = 900_000_000",
            "US_PER_QUARTER = 3_600_000_000",
        ),
    ),
]

SLICES = [
    _book(
        "a lower target shortens a hold",
        "        if extend.output_tokens <= hold.authorized_output_tokens:",
        "        if extend.output_tokens == hold.authorized_output_tokens:",
        EXTENSIONS,
    ),
    _book(
        "an extension reserves its whole amount again",
        "        self._reserve(hold, account, more)",
        "        self._reserve(hold, account, amount)",
        EXTENSIONS,
    ),
    _book(
        "an extension asks the balance alone",
        "        available, refusal = self._tightest(account.available, hold.api_key_id)\n"
        "        if more",
        "        available, refusal = account.available, InsufficientCredit\n        if more",
        EXTENSIONS,
    ),
    _book(
        "a closed hold is extended",
        'if hold.state != "open" or hold.epoch != extend.epoch:',
        "if hold.epoch != extend.epoch:",
        EXTENSIONS,
    ),
    _book(
        "an extension forgets the prompt",
        "            uncached_input=hold.input_tokens,\n            cached_input=0,\n"
        "            output=extend.output_tokens,",
        "            uncached_input=0,\n            cached_input=0,\n"
        "            output=extend.output_tokens,",
        EXTENSIONS,
    ),
    *_of(
        "credit_watch",
        WATCH,
        (
            "one credit wakes everybody",
            "available[waiter.organization_id] = left - waiter.required",
            "available[waiter.organization_id] = left",
        ),
        (
            "somebody waits for more than there must be",
            "if waiter.required <= left and",
            "if waiter.required < left and",
        ),
    ),
    *_of(
        "recharge",
        RECHARGE,
        (
            "a shortage above the threshold charges nobody",
            "available < SHORTAGE_NANO_USD,",
            "available < 0,",
        ),
    ),
]

ENDS = [
    *_of(
        "expiry",
        EXPIRY,
        (
            "an expiry takes what running requests hold",
            "amount = min(lot.remaining_nano_usd, available)",
            "amount = lot.remaining_nano_usd",
        ),
        (
            "the rest of a lot that was held is forgotten",
            'key=f"expiry:{lot_id}:{lot.remaining_nano_usd}"',
            'key=f"expiry:{lot_id}"',
        ),
    ),
    *_of(
        "lots",
        EXPIRY,
        (
            "what ends last is used first",
            "(self.is_paid, expires_at,",
            "(self.is_paid, -expires_at,",
        ),
    ),
    *_of(
        "ledger",
        EXPIRY,
        (
            "an expiry takes from another lot",
            "lots = [lot for lot in lots if lot.id == lot_id]",
            "lots = list(lots)",
        ),
    ),
    *_of(
        "topups",
        RETURNS,
        ("a refund that comes before its payment is lost", "    if not is_known:", "    if False:"),
    ),
    *_of(
        "disputes",
        RETURNS,
        (
            "the same news freezes whom an operator released",
            "dispute.status not in (*FINAL, facts.status)",
            "dispute.status not in FINAL",
        ),
    ),
    *_of(
        "exports",
        EXPORTS,
        (
            "an export of requests ends with its first page",
            "        after = found[-1][0].request_id\n",
            "        if after:\n            return\n        after = found[-1][0].request_id\n",
        ),
        (
            "an export of the ledger takes in the day after",
            "LedgerTransaction.created_at < period.end_us,",
            "LedgerTransaction.created_at < period.end_us + 86_400_000_000,",
        ),
    ),
]

MUTANTS = [
    *RESEARCH,
    *SLICES,
    *LOTS_AND_PRICES,
    *BOUNDS,
    *TOGETHER,
    *ASSUMED,
    *RETURNED,
    *PAID_IN,
    *ENDS,
]
