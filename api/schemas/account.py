"""Sign-up, keys, credits, usage and administration: what is sent and what is answered."""

from typing import Annotated, Literal

from pydantic import Field

from api.schemas.base import Line, RequestBody, ResponseBody

Dollars = Annotated[str, Field(max_length=32, examples=["-12.5"])]
"""A decimal string; a float would not be exact."""
Identifier = Annotated[str, Field(min_length=1, max_length=128)]


class SignUpBody(RequestBody):
    """`POST /v1/signup`."""

    email: str = Field(min_length=3, max_length=320, examples=["ada@example.com"])
    password: str = Field(min_length=1, max_length=1_024)


class SignUpAnswer(ResponseBody):
    """A new account. The key is shown here and never again."""

    organization: str
    email: str
    api_key: str
    key_id: str
    credit: str
    """Dollars granted now; zero when the address must be verified first."""
    is_verification_needed: bool


class ForgotPasswordBody(RequestBody):
    """`POST /v1/password/forgot`."""

    email: str = Field(min_length=3, max_length=320, examples=["ada@example.com"])


class ForgotPasswordAnswer(ResponseBody):
    """The same for every address, so that nobody learns which ones have accounts."""

    message: str


class ResetPasswordBody(RequestBody):
    """`POST /v1/password/reset`."""

    token: str = Field(min_length=1, max_length=128)
    """What follows `token=` in the mail's link."""
    password: str = Field(min_length=1, max_length=1_024)


class ResetPasswordAnswer(ResponseBody):
    """The password is the new one, and every session has ended; API keys go on working."""

    is_reset: bool


class EndingCredit(ResponseBody):
    """Credit that ends at a time."""

    amount: str
    at: str


class CreditsAnswer(ResponseBody):
    """`GET /v1/credits`: decimal strings in dollars with nine places."""

    organization: str
    balance: str
    held: str
    available: str
    promotional: str
    paid: str
    ends_next: EndingCredit | None
    """What ends first of the credit that ends."""


class NewKeyBody(RequestBody):
    """`POST /v1/keys`."""

    name: Line = "API key"
    scopes: list[Literal["inference", "account", "operator"]] = Field(
        default=["inference"], min_length=1, max_length=3
    )
    project: Identifier | None = None


class KeyObject(ResponseBody):
    """A key without its secret."""

    id: str
    object: str = "api_key"
    name: str
    project: str | None
    prefix: str
    last4: str
    scopes: list[str]
    created: int
    expires: int | None
    revoked: int | None
    last_used: int | None


class NewKeyAnswer(KeyObject):
    """A new key; `key` is shown here and never again."""

    key: str


class KeyList(ResponseBody):
    """`GET /v1/keys`."""

    object: str = "list"
    data: list[KeyObject]


class DailyUsageObject(ResponseBody):
    """Sums of one UTC day and model."""

    day: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: str


class TimingObject(ResponseBody):
    """Where the time of a request went."""

    queued_ms: float | None
    queued_behind_own_ms: float | None
    queued_behind_others_ms: float | None
    tenants_active: int | None
    prefill_ms: float | None
    ttft_ms: float | None
    decode_tokens_per_s: float | None
    draft_tokens: int | None
    accepted_draft_tokens: int | None


class GenerationObject(ResponseBody):
    """One closed request, as the ledger has it."""

    id: str
    object: str = "generation"
    model: str
    created: int
    outcome: str
    finish_reason: str | None
    is_streamed: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: str
    api_key_id: str | None
    worker: str | None
    attempts: int
    timing: TimingObject


class UsageAnswer(ResponseBody):
    """`GET /v1/usage`."""

    object: str = "usage"
    days: list[DailyUsageObject]
    recent: list[GenerationObject]


class ModelRequestBody(RequestBody):
    """`POST /v1/model_requests`: a model that should be hosted."""

    model: Line
    reason: Annotated[str, Field(max_length=2_000)] = ""


class ModelRequestAnswer(ResponseBody):
    """The wish is noted."""

    id: str
    object: str = "model_request"
    model: str
    status: str
    created: int


class AdjustCreditBody(RequestBody):
    """`POST /v1/admin/credits/adjust`."""

    organization: Identifier
    amount: Dollars
    reason: Line
    idempotency_key: Identifier | None = None
    """Sent twice with the same key, it is done once."""


class AdjustCreditAnswer(ResponseBody):
    """The ledger entry, and what it came to."""

    transaction: str
    organization: str
    amount: str
    available: str


class UtilisationObject(ResponseBody):
    """What a worker's machine was busy with; parts of the last 10 s, and seconds in all."""

    ridge_tokens: float
    compute: float
    bandwidth: float
    compute_s_total: float
    bandwidth_s_total: float
    compute_bound_s_total: float
    bandwidth_bound_s_total: float
    neither_bound_s_total: float
    prediction_error: float
    is_prediction_trusted: bool


class CostModelObject(ResponseBody):
    """Seconds of a step as the worker predicts them."""

    base_s: float
    per_token_s: float
    per_prefill_context_s: float
    per_decode_context_s: float
    weights_s: float
    overlap: float
    per_sample_s: float


class WorkerObject(ResponseBody):
    """The last heartbeat of one worker."""

    worker: str
    model: str
    revision: str
    state: str
    sent_ms: int
    dtype: str
    num_running: int
    num_waiting: int
    free_kv_tokens: int
    total_kv_tokens: int
    num_steps: int
    output_tokens_total: int
    prefill_tokens_total: int
    num_preemptions: int
    utilisation: UtilisationObject
    cost_model: CostModelObject | None
    load_report: str
    memory_total_bytes: int
    memory_free_bytes: int


class WorkerList(ResponseBody):
    """`GET /v1/admin/workers`."""

    object: str = "list"
    data: list[WorkerObject]


class NewProjectBody(RequestBody):
    """`POST /v1/projects`."""

    name: Line


class ProjectObject(ResponseBody):
    """A group of keys."""

    id: str
    object: str = "project"
    name: str
    created: int


class ProjectList(ResponseBody):
    """`GET /v1/projects`."""

    object: str = "list"
    data: list[ProjectObject]


class BudgetBody(RequestBody):
    """`PUT /v1/budgets`: bounds one key or one project."""

    api_key: Identifier | None = None
    project: Identifier | None = None
    limit: Dollars
    period: Literal["day", "month", "total"] = "month"


class BudgetObject(ResponseBody):
    """A budget and how it stands, in dollars."""

    id: str
    object: str = "budget"
    api_key: str | None
    project: str | None
    period: str
    limit: str
    spent: str
    held: str


class BudgetList(ResponseBody):
    """`GET /v1/budgets`."""

    object: str = "list"
    data: list[BudgetObject]
