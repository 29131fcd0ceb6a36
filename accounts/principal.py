"""Who is asking: the answer of every way to authenticate."""

from dataclasses import dataclass

INFERENCE = "inference"
ACCOUNT = "account"
OPERATOR = "operator"
SCOPES = frozenset({INFERENCE, ACCOUNT, OPERATOR})


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. Every query on a tenant's table names its `organization_id`."""

    organization_id: str
    user_id: str | None
    api_key_id: str | None
    scopes: frozenset[str]

    @property
    def is_operator(self) -> bool:
        """May act on other organizations: host models, adjust credit, see workers."""
        return OPERATOR in self.scopes
