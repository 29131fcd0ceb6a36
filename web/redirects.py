"""Where to go after logging in: never to another site."""

from urllib.parse import urlencode, urlsplit

from starlette.responses import RedirectResponse

AFTER_LOGIN = "/usage"


def safe_next(value: str | None) -> str:
    r"""`value` if it is a path of this site, else the usage page.

    Browsers read `//host`, `/\host` and control characters inside an address in their own ways,
    so that anything but a plain path is refused rather than repaired.
    """
    if not value or not value.startswith("/") or value.startswith("//"):
        return AFTER_LOGIN
    if "\\" in value or not value.isprintable() or not value.isascii() or len(value) > 512:
        return AFTER_LOGIN
    parts = urlsplit(value)
    return AFTER_LOGIN if parts.scheme or parts.netloc else value


def see_other(path: str, **query: str) -> RedirectResponse:
    """303: fetch `path` by GET."""
    return RedirectResponse(f"{path}?{urlencode(query)}" if query else path, status_code=303)
