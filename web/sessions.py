"""Cookies: the session of someone who is signed in, the visit of someone who is not yet."""

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from accounts.sessions import StartedSession
from common.clock import MICROSECONDS_PER_SECOND
from web.services import WebServices
from web.settings import WebSettings

CookieName = Literal["session", "visit", "key"]


def cookie_name(name: CookieName, settings: WebSettings) -> str:
    """`__Host-…` under TLS: no other host and no subdomain can set or overwrite it."""
    return f"__Host-ncompass_{name}" if settings.is_tls else f"ncompass_{name}"


def read_cookie(request: Request, name: CookieName, settings: WebSettings) -> str | None:
    """The cookie's value, or None."""
    return request.cookies.get(cookie_name(name, settings)) or None


def set_cookie(
    response: Response,
    name: CookieName,
    value: str,
    settings: WebSettings,
    *,
    max_age_s: int | None = None,
) -> None:
    """A cookie that scripts cannot read and other sites' forms do not carry; without `max_age_s`
    it ends with the browser."""
    response.set_cookie(
        cookie_name(name, settings),
        value,
        max_age=max_age_s,
        path="/",
        secure=settings.is_tls,
        httponly=True,
        samesite="lax",
    )


def delete_cookie(response: Response, name: CookieName, settings: WebSettings) -> None:
    """Tell the browser to forget a cookie."""
    response.delete_cookie(
        cookie_name(name, settings),
        path="/",
        secure=settings.is_tls,
        httponly=True,
        samesite="lax",
    )


def keep_session(response: Response, started: StartedSession, services: WebServices) -> None:
    """Give the browser its session for as long as the session lives."""
    remaining_us = max(started.expires_at - services.clock(), 0)
    set_cookie(
        response,
        "session",
        started.token,
        services.web_settings,
        max_age_s=remaining_us // MICROSECONDS_PER_SECOND,
    )
