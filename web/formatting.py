"""Numbers and times as the pages print them: exact, in UTC, never 0 for something unmeasured."""

import re
from decimal import Decimal

from markupsafe import Markup, escape

from billing.money import NanoUsd, format_usd
from common.clock import MICROSECONDS_PER_SECOND, to_datetime

UNMEASURED = "\N{EN DASH}"
TICKED = re.compile("`([^`]+)`")


def dollars_and_rest(amount: NanoUsd) -> tuple[str, str]:
    """An amount cut after the cents: `("$99.99", "8732100")`. Cut, not rounded: both halves
    together are the exact amount."""
    sign, digits = ("\N{MINUS SIGN}", -amount) if amount < 0 else ("", amount)
    whole, fraction = format_usd(NanoUsd(digits)).split(".")
    return f"{sign}${int(whole):,}.{fraction[:2]}", fraction[2:]


def exact_dollars(amount: NanoUsd) -> str:
    """All nine places: `$0.000012340`."""
    return "".join(dollars_and_rest(amount))


def leading_zeros_and_rest(amount: NanoUsd) -> tuple[str, str]:
    """A small amount cut before its first digit that counts: `("$0.0000", "19820")`, so that a
    column of costs shows their sizes."""
    exact = exact_dollars(amount)
    rest = exact.lstrip("$0.\N{MINUS SIGN}")
    return exact[: len(exact) - len(rest)], rest


def trimmed_dollars(amount: NanoUsd) -> str:
    """For prices, axes and totals: at least cents, and every digit that the amount has."""
    cents, rest = dollars_and_rest(amount)
    return cents + rest.rstrip("0")


def count(value: int | None) -> str:
    """`12,345`, or a dash for what was never measured."""
    return UNMEASURED if value is None else f"{value:,}"


def compact_count(value: int) -> str:
    """`950`, `12.3K`, `4.1M`: for headings, where the exact number stands nearby."""
    for size, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= size:
            return f"{Decimal(value) / size:.1f}".removesuffix(".0") + suffix
    return str(value)


def tokens_of_context(value: int) -> str:
    """A context length as people say it: `8K` for 8192, `128K` for 131072, else the number."""
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else f"{value:,}"


def duration(microseconds: int | None) -> str:
    """`84 ms`, `1.32 s`, or a dash for what was never measured."""
    if microseconds is None:
        return UNMEASURED
    if microseconds < 1_000:
        return "<1 ms"
    if microseconds < MICROSECONDS_PER_SECOND:
        return f"{microseconds // 1_000} ms"
    return f"{Decimal(microseconds) / MICROSECONDS_PER_SECOND:.2f} s"


def timestamp(time_us: int | None) -> str:
    """`2026-03-09 14:02:11`, UTC, or a dash."""
    return UNMEASURED if time_us is None else to_datetime(time_us).strftime("%Y-%m-%d %H:%M:%S")


def iso_timestamp(time_us: int) -> str:
    """For `<time datetime>`."""
    return to_datetime(time_us).isoformat(timespec="milliseconds")


def day(time_us: int | None) -> str:
    """`2026-03-09`, UTC, or a dash."""
    return UNMEASURED if time_us is None else to_datetime(time_us).strftime("%Y-%m-%d")


def ago(time_us: int | None, now_us: int) -> str:
    """`just now`, `4 min ago`, `3 h ago`, `2 days ago`; `never` for None."""
    if time_us is None:
        return "never"
    seconds = max(now_us - time_us, 0) // MICROSECONDS_PER_SECOND
    if seconds < 60:
        return "just now"
    if seconds < 3_600:
        return f"{seconds // 60} min ago"
    if seconds < 86_400:
        return f"{seconds // 3_600} h ago"
    days = seconds // 86_400
    return f"{days} day ago" if days == 1 else f"{days} days ago"


def wait(seconds: int) -> str:
    """`40 seconds`, `3 minutes`: rounded up, so that a retry at that time is not too early."""
    if seconds <= 90:
        return f"{max(seconds, 1)} second" + ("" if seconds <= 1 else "s")
    minutes = -(-seconds // 60)
    return f"{minutes} minutes"


def marked(text: str) -> Markup:
    """Text with `code` between ticks, as our docstrings have it."""
    return Markup(TICKED.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped just now
