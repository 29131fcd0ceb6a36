"""Is this form ours, and was it this browser that asked for it?

Two independent checks, both for every unsafe request:

1. Where it comes from. Browsers name the sender in `Sec-Fetch-Site` and `Origin`; another site is
   refused. A client that sends neither is judged by the second check alone.
2. What it carries. A signed-in form carries the token of its session. A visitor without a session
   gets a random visit cookie, and the form carries its HMAC under the server's secret (the signed
   double-submit cookie), so that nobody can log a victim in to the attacker's account.
   Source: OWASP, Cross-Site Request Forgery Prevention Cheat Sheet.
"""

import hashlib
import hmac
import secrets
from urllib.parse import urlsplit

from starlette.requests import Request

from web.errors import FormForged
from web.settings import WebSettings

TOKEN_FIELD = "csrf_token"  # noqa: S105 - the field's name, not a secret
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def new_visit() -> str:
    """A random name for a browser without a session."""
    return secrets.token_urlsafe(32)


def visit_token(visit: str, settings: WebSettings) -> str:
    """The form token that belongs to a visit cookie."""
    secret = settings.cookie_secret.get_secret_value().encode()
    return hmac.new(secret, b"csrf:" + visit.encode(), hashlib.sha256).hexdigest()


def refuse_foreign_sender(request: Request, settings: WebSettings) -> None:
    """Check 1; raises FormForged."""
    site = request.headers.get("sec-fetch-site", "none")
    origin = request.headers.get("origin")
    if site not in ("same-origin", "none"):
        raise FormForged("This form was sent by another site.", sec_fetch_site=site)
    if origin is not None and origin not in _own_origins(request, settings):
        raise FormForged("This form was sent by another site.", origin=origin)


def refuse_foreign_token(posted: str, expected: str | None) -> None:
    """Check 2; raises FormForged. `expected` is None for a browser that never opened the form."""
    if expected is None or not hmac.compare_digest(posted.encode(), expected.encode()):
        raise FormForged("This form is out of date. Open the page again and repeat it.")


def _own_origins(request: Request, settings: WebSettings) -> set[str]:
    scheme = "https" if settings.is_tls else request.url.scheme
    origins = {f"{scheme}://{request.headers.get('host', '')}"}
    if settings.public_url is not None:
        parts = urlsplit(str(settings.public_url))
        origins.add(f"{parts.scheme}://{parts.netloc}")
    return origins
