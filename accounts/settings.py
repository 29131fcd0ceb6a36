"""Settings of accounts: secrets of API keys, cost of passwords, limits on attempts."""

from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class AccountsSettings(BaseSettings):
    """`NCOMPASS_ACCOUNTS_…`."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_ACCOUNTS_", frozen=True)

    api_key_peppers: dict[int, SecretStr] = Field(default_factory=dict)
    """Version → secret, as JSON (`{"1": "…"}`). The highest signs new keys, all of them verify."""

    argon2_memory_kib: int = 19_456
    argon2_iterations: int = 2
    argon2_parallelism: int = 1
    """OWASP's minimum for argon2id (19 MiB, t=2, p=1): 20 ms to 80 ms a hash."""
    password_threads: int = 2
    """So many passwords are hashed at once, so that a login flood cannot eat the machine."""

    session_ttl_s: int = 14 * 86_400
    email_token_ttl_s: int = 3_600
    is_email_verification_on: bool = False
    """On: the free credit comes with the verified address. Off: at sign-up (loopback only)."""
    is_disposable_email_refused: bool = True

    login_attempts_per_email: int = 50
    login_attempts_per_email_and_network: int = 10
    login_attempts_per_network: int = 100
    login_window_s: int = 900
    signups_per_network: int = 60
    signups_per_email: int = 5
    signup_window_s: int = 3_600
    reset_mails_per_network: int = 30
    reset_mails_per_email: int = 5
    resets_per_network: int = 60
    reset_window_s: int = 3_600

    public_base_url: str = "http://127.0.0.1:8000"
    """Where links in mails lead."""
    mail_backend: Literal["console", "smtp"] = "console"
    mail_from: str = "nCompass <no-reply@localhost>"
    smtp_host: str = "127.0.0.1"
    smtp_port: int = 587
    smtp_username: str = ""
    smtp_password: SecretStr = SecretStr("")
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """`tls` from the first byte (port 465); `none` only for a relay on the same machine."""
    smtp_timeout_s: float = 20.0
