"""What a finished request used, cost and took: the `usage` and `timing` of every answer."""

from dataclasses import dataclass
from typing import Any

from billing.money import format_usd

MICROSECONDS_PER_MILLISECOND = 1_000


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in microseconds; None where the worker never told."""

    ttft_us: int | None = None
    """From arrival here to the first token here: what the caller waited, the network apart."""
    queued_us: int | None = None
    prefill_us: int | None = None
    decode_us: int | None = None
    behind_own_us: int | None = None
    """Of `queued_us`: what the machine spent on other requests of the same organization."""
    behind_others_us: int | None = None
    """Of `queued_us`: what the machine spent on other organizations."""
    tenants_active: int | None = None
    """Organizations that were served meanwhile, the own included."""

    draft_tokens: int | None = None
    """Tokens that were guessed ahead and computed with those that were due, all choices together."""
    accepted_draft_tokens: int | None = None

    def as_json(self, output_tokens: int, num_choices: int = 1) -> dict[str, Any]:
        """The `timing` object; the decode rate is of one choice, after its first token."""
        rate = None
        if self.decode_us and output_tokens > num_choices:
            decoded = (output_tokens - num_choices) / num_choices
            rate = round(decoded / (self.decode_us / 1e6), 3)
        return {
            "queued_ms": milliseconds(self.queued_us),
            "queued_behind_own_ms": milliseconds(self.behind_own_us),
            "queued_behind_others_ms": milliseconds(self.behind_others_us),
            "tenants_active": self.tenants_active,
            "prefill_ms": milliseconds(self.prefill_us),
            "ttft_ms": milliseconds(self.ttft_us),
            "decode_tokens_per_s": rate,
            "draft_tokens": self.draft_tokens,
            "accepted_draft_tokens": self.accepted_draft_tokens,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """A settled request, to the nano-dollar as the ledger has it."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_choices: int
    charge_nano_usd: int
    available_nano_usd: int
    timings: Timings
    reasoning_tokens: int = 0
    """Those of `completion_tokens` that the model spent on reasoning."""
    num_prompts: int = 1
    """Generations whose sum this is."""

    def usage(self) -> dict[str, Any]:
        """The `usage` object. `prompt_tokens` includes the cached ones, as OpenAI counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        } | self.money()

    def money(self) -> dict[str, str]:
        """What was charged and what is left, in dollars."""
        return {
            "cost": format_usd(self.charge_nano_usd),
            "balance_remaining": format_usd(self.available_nano_usd),
        }

    def timing(self) -> dict[str, Any]:
        """The `timing` object."""
        return self.timings.as_json(self.completion_tokens, self.num_choices)


def milliseconds(microseconds: int | None) -> float | None:
    """Milliseconds with three places, or None."""
    return None if microseconds is None else microseconds / MICROSECONDS_PER_MILLISECOND
