"""What an operator may change about the API tier."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine.cost_model import ALPHA

MEBIBYTE = 1024 * 1024


class ApiSettings(BaseSettings):
    """`NCOMPASS_API_…`: limits on what is read, and on how long anything may wait."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_API_", frozen=True)

    body_bytes_max: int = Field(default=8 * MEBIBYTE, ge=1024)
    """A longer body is answered 413. 131,072 tokens of English are about 0.6 MiB."""
    body_drain_bytes_max: int = 64 * MEBIBYTE
    """A body that is too long is still read to here, so that the client hears the answer."""
    body_timeout_s: float = 60.0

    default_max_tokens: int | None = None
    """Chat output when the caller sets no limit. None: to the end of the context."""
    priority_alpha: float = ALPHA
    """Ageing inside a tenant: seconds of prefill that one second of waiting is worth."""

    catalogue_ttl_s: float = 1.0
    """How long the list of models and prices may be out of date."""
    tokenizers_max: int = 32
    """Tokenizers kept in memory; the least recently used one goes first."""
    tokenize_concurrency: int = 4
    """Long prompts tokenized at the same time; short ones never wait for them."""

    model_wait_s: float = 30.0
    """How long a request waits for a model that has no live worker before it gets 503."""
    queue_report_interval_s: float = 1.0
    """How often a waiting stream is told its position."""
    silence_timeout_s: float = 600.0
    """A running request that produces nothing for so long counts as lost."""
    send_timeout_s: float = 60.0
    """A client that reads nothing for so long counts as gone."""
    credit_pause_s: float = Field(default=60.0, ge=0)
    """How long an answer without credit keeps its place before it ends."""
    settle_wait_s: float = 30.0
    """How long an answer waits for its settlement to commit; the settlement itself goes on."""
    drain_timeout_s: float = 20.0
    """At shutdown, how long running requests may take to finish before they are cut and voided."""
