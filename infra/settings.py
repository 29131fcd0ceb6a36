"""Settings of the one-machine set-up and of the ASGI composition."""

from pathlib import Path

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class InfraSettings(BaseSettings):
    """`NCOMPASS_…`; `PORT` and `VAR` may stand without the prefix, as in `make run PORT=8001`."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_", frozen=True, env_ignore_empty=True)

    var: Path = Field(default=Path("var"), validation_alias=AliasChoices("NCOMPASS_VAR", "VAR"))
    """All state: database, logs, models, secrets, compiled kernels."""
    host: str = "127.0.0.1"
    port: int = Field(
        default=8000, ge=1, le=65_535, validation_alias=AliasChoices("NCOMPASS_PORT", "PORT")
    )
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """Where Prometheus scrapes this process; 0: nowhere (the supervisor chooses a free port)."""

    workers: int = Field(default=1, ge=0, le=64)
    """Engine workers per hosted model."""
    api_processes: int = Field(default=1, ge=1, le=64)
    """More than one needs PostgreSQL: SQLite has one writer, and each API process is one."""

    database_url: SecretStr | None = None
    """None: SQLite under `var`."""
    redis_url: SecretStr | None = None
    """None: an embedded Redis that lives and dies with the supervisor."""

    hub_endpoint: str | None = Field(
        default=None, validation_alias=AliasChoices("NCOMPASS_HUB_ENDPOINT", "HF_ENDPOINT")
    )
    """The model hub that `models add owner/name` asks; None: the public one."""
    hub_token: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("NCOMPASS_HUB_TOKEN", "HF_TOKEN")
    )
    """For models that are gated or private."""

    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long everything together may take to become ready, once it is set up."""
    backlog: int = 4096
    """Connections that may wait to be accepted: thousands of streams open at once."""
    drain_timeout_s: float = Field(default=45.0, gt=0)
    """At stop, how long each part may take before it is killed."""
    catalogue_interval_s: float = Field(default=1.0, gt=0)
    """How often the supervisor looks for models that were added or drained."""
    log_bytes_max: int = 32_000_000
    """A longer log is set aside at start (one old copy is kept)."""
