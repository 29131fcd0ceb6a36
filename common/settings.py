"""Settings that every process shares. Read once where a process starts, then passed in."""

from pathlib import Path

from pydantic import SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class CommonSettings(BaseSettings):
    """`NCOMPASS_…`: where the data lives and how loud the logs are."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_", frozen=True)

    var: Path = Path("var")
    database_url: SecretStr = SecretStr("sqlite+aiosqlite:///var/ncompass.sqlite3")
    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    log_level: str = "INFO"
    log_format: str = "console"
    """`console` for people, `json` for machines."""
