"""What every answer of the web tells the browser: run no foreign code, be framed by nobody,
keep no copy."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from web.settings import WebSettings

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "form-action 'self'",
    )
)
"""Scripts and styles are files of ours; nothing inline, nothing from elsewhere."""

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    # NOTE: `no-referrer` would make browsers send `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


def add_security_headers(headers: MutableHeaders, settings: WebSettings) -> None:
    """Set the headers above, HSTS under TLS, and `no-store` unless the answer chose otherwise."""
    for name, value in HEADERS.items():
        headers[name] = value
    headers["content-security-policy"] += f" {settings.checkout_origin}"
    headers.setdefault("cache-control", "no-store")
    if settings.is_tls:
        headers["strict-transport-security"] = "max-age=31536000"


class SecurityHeaders:
    """ASGI middleware that adds them to every answer. The 500 page is made outside of all
    middleware and adds them itself."""

    def __init__(self, app: ASGIApp, settings: WebSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and the answer back with the headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                add_security_headers(MutableHeaders(scope=message), self._settings)
            await send(message)

        await self._app(scope, receive, send_with_headers)
