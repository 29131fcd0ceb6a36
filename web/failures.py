"""Failures as pages. The one place of the web where an error becomes a status."""

from dataclasses import dataclass

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from accounts.errors import InvalidToken, KeyNotFound, ThrottleUnavailable, TooManyAttempts
from billing.errors import LedgerUnavailable, TopupNotFound
from common.errors import PlatformError
from common.ids import new_id
from engine.errors import ModelNotFound
from web.errors import (
    FormForged,
    FormTooLarge,
    FormUnreadable,
    HandoverFailed,
    LoginRequired,
)
from web.formatting import wait
from web.pages import NOBODY, get_pages
from web.redirects import see_other
from web.security import add_security_headers
from web.settings import WebSettings

log = structlog.get_logger(__name__)

HOME = ("/", "Go to the front page")
MODELS = ("/models", "See the models")


@dataclass(frozen=True, slots=True)
class Failure:
    """What the page says, in words for people."""

    status: int
    title: str
    message: str
    links: tuple[tuple[str, str], ...] = (HOME,)


NOT_FOUND = Failure(404, "Nothing here", "There is no page at this address.", (HOME, MODELS))
NO_SUCH_MODEL = Failure(
    404,
    "No such model",
    "We do not host a model of this name. You can ask for it.",
    (("/models#ask", "Ask for a model"),),
)
NO_SUCH_KEY = Failure(
    404, "No such key", "You have no key of this id.", (("/keys", "See your keys"),)
)
BAD_LINK = Failure(
    400,
    "This link does not work",
    "It has been used, has expired, or was cut off on its way. Ask for another one: for a new "
    "password below, to confirm your address after logging in.",
    (("/welcome", "Log in"), ("/forgot", "Forgot your password?")),
)
WRONG_METHOD = Failure(405, "Not like this", "This address does not take that kind of request.")
FORGED = Failure(
    403,
    "This form is out of date",
    "It was opened before you logged in or out, or another site sent it, so nothing was changed. "
    "Open the page again and repeat it.",
    (("/login", "Log in"), HOME),
)
UNREADABLE = Failure(400, "Not readable", "The form did not arrive as browsers send it.")
TOO_LARGE = Failure(413, "Too large", "The form holds more than we accept.")
UNAVAILABLE = Failure(
    503, "Back in a moment", "A part of the service is being restarted. Try again in a minute."
)
BROKEN = Failure(
    500,
    "That was us",
    "Something went wrong on our side. Nothing that you did caused it, and nothing was charged.",
)

FAILURES: dict[type[PlatformError], Failure] = {
    ModelNotFound: NO_SUCH_MODEL,
    KeyNotFound: NO_SUCH_KEY,
    InvalidToken: BAD_LINK,
    TopupNotFound: NOT_FOUND,
    FormForged: FORGED,
    FormUnreadable: UNREADABLE,
    FormTooLarge: TOO_LARGE,
    ThrottleUnavailable: UNAVAILABLE,
    HandoverFailed: UNAVAILABLE,
    LedgerUnavailable: UNAVAILABLE,
}


def add_failure_pages(app: FastAPI, settings: WebSettings) -> None:
    """Teach the application to answer every failure with a page."""

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        failure = {404: NOT_FOUND, 405: WRONG_METHOD}.get(error.status_code)
        if failure is None:
            failure = Failure(error.status_code, "Not possible", str(error.detail))
        return _page(request, failure, headers=dict(error.headers or {}))

    @app.exception_handler(LoginRequired)
    async def _login(request: Request, error: LoginRequired) -> Response:
        query = {"next": error.facts["next"]} if error.facts["next"] else {}
        return see_other("/login", **query)

    @app.exception_handler(TooManyAttempts)
    async def _too_many(request: Request, error: TooManyAttempts) -> Response:
        retry_after_s = int(error.facts["retry_after_s"])
        failure = Failure(
            429,
            "Too many attempts",
            f"To keep accounts safe we slow down log-in, sign-up and resets. Try again in "
            f"{wait(retry_after_s)}. The API itself is not affected.",
        )
        return _page(request, failure, headers={"retry-after": str(retry_after_s)})

    async def _platform(request: Request, error: Exception) -> Response:
        assert isinstance(error, PlatformError)
        return _page(request, FAILURES[type(error)])

    for error_class in FAILURES:
        app.add_exception_handler(error_class, _platform)

    @app.exception_handler(Exception)
    async def _broken(request: Request, error: Exception) -> Response:
        reference = new_id("err")
        log.error("page_failed", reference=reference, path=request.url.path, error=type(error))
        response = _page(request, BROKEN, reference=reference)
        add_security_headers(response.headers, settings)
        return response


def _page(
    request: Request,
    failure: Failure,
    *,
    headers: dict[str, str] | None = None,
    reference: str | None = None,
) -> Response:
    return get_pages(request).render(
        request,
        "error.html",
        NOBODY,
        status_code=failure.status,
        headers=headers,
        status=failure.status,
        title=failure.title,
        message=failure.message,
        links=failure.links,
        reference=reference,
    )
