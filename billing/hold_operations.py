"""What can be done to a hold, and what comes of it.

    AdmitHold ──► open ──ExtendHold──► open ──SettleHold──► settled
                   │                    └──────VoidHold────► voided
                   └──────────────────────────────────────► (either)

Each is idempotent: done again, it changes nothing and gives the same answer.
"""

from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["completed", "length", "aborted", "platform_fault", "gateway_lost"]


@dataclass(frozen=True, slots=True)
class UsageFacts:
    """How a request went; kept beside its usage. Durations in microseconds."""

    worker: str | None = None
    attempts: int = 1
    ttft_us: int | None = None
    queued_us: int | None = None
    prefill_us: int | None = None
    decode_us: int | None = None
    behind_own_us: int | None = None
    """The part of `queued_us` in which the machine served the same organization."""
    behind_others_us: int | None = None
    tenants_active: int | None = None
    draft_tokens: int | None = None
    """Guessed ahead by the worker; what of them was accepted is part of the output."""
    accepted_draft_tokens: int | None = None
    finish_reason: str | None = None
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose hold it is, where the caller knows: then all that is needed is asked for at once."""

    organization_id: str
    api_key_id: str | None


@dataclass(frozen=True, slots=True)
class AdmitHold:
    """Reserve the whole prompt at the uncached price and `output_tokens` over all choices."""

    request_id: str
    organization_id: str
    api_key_id: str | None
    """None for a logged-in browser."""
    model: str
    price_id: str
    gateway: str
    input_tokens: int
    output_tokens: int
    num_choices: int = 1
    """The least that must fit is one token for each; what is authorized is a multiple of it."""

    @property
    def owner(self) -> Owner:
        """Whose hold it will be."""
        return Owner(self.organization_id, self.api_key_id)


@dataclass(frozen=True, slots=True)
class ExtendHold:
    """Reserve up to `output_tokens` in all: a target, not an increment, so a retry is harmless."""

    request_id: str
    epoch: int
    output_tokens: int
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class SettleHold:
    """Charge what was used and free the rest. The three counts are disjoint."""

    request_id: str
    epoch: int
    uncached_input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    """Tokens accepted into the response, over all choices."""
    outcome: Outcome
    facts: UsageFacts = field(default_factory=UsageFacts)
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class VoidHold:
    """Free the whole hold; the customer pays nothing."""

    request_id: str
    epoch: int
    outcome: Outcome
    facts: UsageFacts = field(default_factory=UsageFacts)
    is_fencing: bool = False
    """The sweeper's way: the epoch moves on, so that whoever lost the hold cannot use it."""
    owner: Owner | None = None


HoldOperation = AdmitHold | ExtendHold | SettleHold | VoidHold


@dataclass(frozen=True, slots=True)
class Hold:
    """An open hold, as its gateway knows it."""

    request_id: str
    epoch: int
    authorized_output_tokens: int
    """Output tokens that are paid for, over all choices: the engine's fence."""
    amount_nano_usd: int


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a hold ended."""

    charge_nano_usd: int
    available_nano_usd: int
    """What the organization may still spend."""
