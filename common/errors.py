"""The root of every error this platform raises.

PlatformError
├── accounts.errors.AccountError     who you are
├── billing.errors.BillingError      what you may spend
├── engine.errors.EngineError        tokens in, tokens out
└── api.errors.InvalidRequest        what you sent

An `assert` says "our bug"; an exception says "the world's fault". Each error keeps the facts that
explain it, so that `api/errors.py` and `web/` can render it without parsing a sentence.
"""

from typing import Any, ClassVar


class PlatformError(Exception):
    """An expected failure, with a stable machine-readable `code` and a sentence for people.

    `facts` are the ids and quantities that explain it; they never hold a secret or a prompt.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
