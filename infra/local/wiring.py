"""What the processes of one machine must know: addresses and secrets, as one environment.

What the user has set in the environment wins over what is made up here.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.local.secret_store import Secrets
from infra.settings import InfraSettings

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: every part runs in place."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """The addresses of one running platform."""

    settings: InfraSettings
    secrets: Secrets
    redis_url: str = field(repr=False)
    metrics_port: int

    @property
    def var(self) -> Path:
        """The state directory, absolute: parts do not depend on where they are started."""
        return self.settings.var.resolve()

    @property
    def hostings_file(self) -> Path:
        """Which models the workers host; the supervisor writes it."""
        return self.var / "hosted_models.json"

    @property
    def origin(self) -> str:
        """`http://127.0.0.1:8000`."""
        host = self.settings.host if is_loopback(self.settings.host) else "127.0.0.1"
        return f"http://{'[::1]' if host == '::1' else host}:{self.settings.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its `base_url`."""
        return self.origin + "/v1"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus scrapes the first API process."""
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def database_url(self) -> str:
        """The database: the one that was named, else SQLite under `var`."""
        return database_url(self.settings)

    def environment(self) -> dict[str, str]:
        """The environment of every part."""
        made: Mapping[str, str] = {
            "NCOMPASS_ACCOUNTS_API_KEY_PEPPERS": json.dumps({"1": self.secrets.api_key_pepper}),
            "NCOMPASS_ACCOUNTS_PUBLIC_BASE_URL": self.origin,
            "NCOMPASS_WEB_COOKIE_SECRET": self.secrets.cookie_secret,
            "NCOMPASS_ENGINE_KERNEL_CACHE": str(self.var / "kernels"),
            "NCOMPASS_ENGINE_CALIBRATION_CACHE": str(self.var / "calibration"),
        }
        fixed = {
            "NCOMPASS_VAR": str(self.var),
            "NCOMPASS_PORT": str(self.settings.port),
            "NCOMPASS_DATABASE_URL": self.database_url,
            "NCOMPASS_REDIS_URL": self.redis_url,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            # transformers must never look for a hub while a model starts.
            "HF_HUB_OFFLINE": "1",
        }
        return {**made, **os.environ, **fixed}


def database_url(settings: InfraSettings) -> str:
    """The database of these settings: the one that was named, else SQLite under `var`."""
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    return f"sqlite+aiosqlite:///{settings.var.resolve() / 'ncompass.sqlite3'}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return host in {"127.0.0.1", "::1", "localhost"} or host.startswith("127.")
