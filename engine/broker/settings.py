"""How patient the broker is, and the limits of everything that it keeps."""

from pydantic_settings import BaseSettings, SettingsConfigDict


class BrokerSettings(BaseSettings):
    """`NCOMPASS_BROKER_…`: the same values for gateways and workers of one deployment."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_BROKER_", frozen=True)

    lease_ms: int = 5_000
    """A worker that has not renewed for this long has lost its requests."""
    node_ms: int = 5_000
    """An API node that has not announced itself for this long is dead."""
    worker_ms: int = 3_000
    """A worker whose heartbeat is older is not shown any more."""
    request_ms: int = 24 * 3600 * 1000
    """No prompt stays in Redis longer than this, whatever happens."""
    max_attempts: int = 3
    """A request that took this many workers down with it is given up."""
    announce_interval_s: float = 1.0
    """Pause between two announcements of an API node, and between two looks at its queue places."""
    heartbeat_cache_s: float = 0.5
    """How old the list of workers may be that a gateway answers with."""
    patience_s: float = 5.0
    """How long a gateway retries a command before it calls the queue unreachable."""
    streams_limit: int = 50_000
    """Open streams of one API node."""
    commands_limit: int = 200_000
    """Commands of one API node that wait for Redis."""
    command_batch: int = 256
    """Commands that share one round trip; the round trip never waits for more to arrive."""
