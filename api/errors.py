"""The one seam where a failure becomes an HTTP answer.

PlatformError
├── InvalidRequest         400  what you sent; `param` is the path of the field
│   ├── UnsupportedParameter   400  a parameter that this version does not have
│   ├── BodyTooLarge           413
│   └── UnsupportedEncoding    415
├── KeyMissing             401  no bearer key
├── ScopeMissing           403  the key may not do this
├── UnknownObject          404  no such thing, or not yours
├── StructureRefused       400  the form that the answer must have cannot be compiled
├── GenerationFailed       503  the worker gave up: our fault, nothing is charged
├── SettlementDelayed      503  the answer is ready but its charge could not be recorded yet
└── ServiceClosing         503  this process is shutting down

The errors of `accounts`, `billing` and `engine` are answered by the table below. The body is always
`{"error": {"message", "type", "param", "code"}}` with `code` a string or null: openai-python and
every client built on it read exactly these.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import redis.exceptions
import sqlalchemy.exc
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accounts import errors as accounts
from billing import errors as billing
from billing.money import format_usd
from common.errors import PlatformError
from engine import errors as engine

log = structlog.get_logger()

RETRY_AFTER_S = 2
"""openai-python, openai-node and anthropic honour `retry-after` up to 120 s."""


class InvalidRequest(PlatformError):
    code = "invalid_value"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class BodyTooLarge(InvalidRequest):
    code = "request_too_large"


class UnsupportedEncoding(InvalidRequest):
    code = "unsupported_encoding"


class KeyMissing(PlatformError):
    code = "invalid_api_key"


class ScopeMissing(PlatformError):
    code = "insufficient_scope"


class UnknownObject(PlatformError):
    code = "not_found"


class StructureRefused(PlatformError):
    code = "invalid_structure"


class GenerationFailed(PlatformError):
    code = "generation_failed"


class SettlementDelayed(PlatformError):
    code = "settlement_delayed"


class ServiceClosing(PlatformError):
    code = "server_closing"


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """A failure as HTTP: status, OpenAI's four fields, and what only some failures add."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> bytes:
        """The JSON body; in a started stream, the payload of the error event."""
        error = {"message": self.message, "type": self.type, "param": self.param}
        return msgspec.json.encode({"error": error | {"code": self.code} | dict(self.facts)})

    def anthropic_envelope(self, request_id: str | None = None) -> bytes:
        """The same in the form that Anthropic's clients read."""
        error = {"type": ANTHROPIC_TYPES.get(self.status, "api_error"), "message": self.message}
        told = {"param": self.param, "code": self.code} | dict(self.facts)
        return msgspec.json.encode(
            {"type": "error", "error": error | told, "request_id": request_id}
        )

    def response(self, scope: Scope) -> Response:
        """The same as a response of its own, in the form of the protocol that was addressed."""
        body = self.envelope()
        if scope["path"].startswith(ANTHROPIC_PATH):
            body = self.anthropic_envelope(scope.get("state", {}).get("request_id"))
        return Response(body, self.status, dict(self.headers), media_type="application/json")


@dataclass(frozen=True, slots=True)
class Rendering:
    """How one class of errors, and its subclasses, is answered."""

    status: int
    type: str = "invalid_request_error"
    code: str | None = None
    """None: the error's own code."""
    param: str | None = None
    should_retry: bool | None = None


UNAVAILABLE = "service_unavailable_error"

RENDERINGS: dict[type[PlatformError], Rendering] = {
    # what you sent
    InvalidRequest: Rendering(400),
    BodyTooLarge: Rendering(413),
    UnsupportedEncoding: Rendering(415),
    UnknownObject: Rendering(404),
    StructureRefused: Rendering(400),
    # who you are
    KeyMissing: Rendering(401),
    accounts.InvalidKey: Rendering(401),
    accounts.KeyRevoked: Rendering(401, code="invalid_api_key"),
    accounts.KeyExpired: Rendering(401, code="invalid_api_key"),
    accounts.KeyNotFound: Rendering(404),
    accounts.ProjectNotFound: Rendering(404, param="project"),
    accounts.OrganizationNotFound: Rendering(404, param="organization"),
    accounts.OrganizationFrozen: Rendering(403, "permission_error"),
    accounts.ScopeNotAllowed: Rendering(403, "permission_error", param="scopes"),
    accounts.InvalidEmail: Rendering(400, param="email"),
    accounts.DisposableEmail: Rendering(400, param="email"),
    accounts.EmailTaken: Rendering(400, param="email"),
    accounts.WeakPassword: Rendering(400, param="password"),
    accounts.InvalidToken: Rendering(400, param="token"),
    # The only 429s of the product: sign-up and password resets. Inference is never refused for
    # its rate.
    accounts.TooManyAttempts: Rendering(429, "too_many_attempts"),
    accounts.ThrottleUnavailable: Rendering(503, UNAVAILABLE, should_retry=True),
    ScopeMissing: Rendering(403, "permission_error"),
    # tokens
    engine.ModelNotFound: Rendering(404, param="model"),
    engine.AdditionRefused: Rendering(400, param="source"),
    engine.AdditionNotFound: Rendering(404),
    engine.PromptTooLong: Rendering(400),
    engine.TemplateRejected: Rendering(400, param="messages"),
    engine.ModelUnavailable: Rendering(503, UNAVAILABLE, should_retry=True),
    engine.RequestLost: Rendering(503, UNAVAILABLE, should_retry=True),
    GenerationFailed: Rendering(503, UNAVAILABLE, should_retry=False),
    SettlementDelayed: Rendering(503, UNAVAILABLE, should_retry=False),
    ServiceClosing: Rendering(503, UNAVAILABLE, should_retry=True),
    # money
    billing.InsufficientCredit: Rendering(
        402, "insufficient_quota", "insufficient_credit", should_retry=False
    ),
    billing.BudgetExceeded: Rendering(402, "insufficient_quota", should_retry=False),
    billing.InvalidPeriod: Rendering(400),
    billing.PriceNotFound: Rendering(503, UNAVAILABLE, "model_unavailable", should_retry=False),
    billing.LedgerUnavailable: Rendering(503, UNAVAILABLE, should_retry=True),
    billing.PaymentMismatch: Rendering(400),
    billing.PaymentsOff: Rendering(404),
    billing.InvalidAmount: Rendering(400, param="amount"),
    billing.InvalidPrice: Rendering(400, param="input_price"),
    billing.LedgerConflict: Rendering(400, param="idempotency_key"),
}

INTERNAL = ErrorAnswer(
    500,
    "The server failed. Nothing was charged; please try again or tell us the x-request-id.",
    "server_error",
    "internal_error",
)


OUT_OF_REACH = ErrorAnswer(
    503,
    "A part of this service is out of reach. Nothing was charged; please try again.",
    UNAVAILABLE,
    "service_unavailable",
    headers={"retry-after": str(RETRY_AFTER_S), "x-should-retry": "true"},
)
"""The database or Redis does not answer."""

CONNECTION_ERRORS = (
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.TimeoutError,
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
)


def rendering_of(error: PlatformError) -> Rendering | None:
    """The closest entry of the table along the error's classes; None for one of our own bugs."""
    for ancestor in type(error).__mro__:
        if ancestor in RENDERINGS:
            return RENDERINGS[ancestor]
    return None


def answer(error: Exception) -> ErrorAnswer:
    """The HTTP answer to any exception; one that nobody expected shows no details."""
    if isinstance(error, ValidationError):
        return invalid_fields(error.errors(include_url=False, include_input=False))
    if isinstance(error, CONNECTION_ERRORS):
        return OUT_OF_REACH
    if not isinstance(error, PlatformError):
        return INTERNAL
    rendering = rendering_of(error)
    if rendering is None:
        return INTERNAL
    headers: dict[str, str] = {}
    if rendering.should_retry is not None:
        headers["x-should-retry"] = str(rendering.should_retry).lower()
    if rendering.status == 503:
        headers["retry-after"] = str(RETRY_AFTER_S)
    if rendering.status == 401:
        headers["www-authenticate"] = "Bearer"
    if rendering.status == 429:
        headers["retry-after"] = str(max(1, int(error.facts.get("retry_after_s", 1))))
    return ErrorAnswer(
        status=rendering.status,
        message=error.message,
        type=rendering.type,
        code=rendering.code or error.code,
        param=error.facts.get("param", rendering.param),
        facts=_credit_facts(error),
        headers=headers,
    )


def _credit_facts(error: PlatformError) -> dict[str, str]:
    """`available` and `required` in dollars, so that a program knows how much to add."""
    if not isinstance(error, billing.InsufficientCredit):
        return {}
    return {name: format_usd(error.facts[name]) for name in ("available", "required")}


def field_path(location: Iterable[int | str]) -> str | None:
    """`("messages", 0, "content")` as `messages[0].content`.

    Parts that start with `<` name the branch of a union, which is ours and not the caller's.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path or None


def invalid_fields(problems: Iterable[Any]) -> ErrorAnswer:
    """400 for the first of pydantic's problems; its input is never repeated."""
    problem = next(iter(problems))
    param = field_path(problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    where = f"Invalid value for '{param}': " if param else ""
    code = "missing_required_parameter" if problem["type"] == "missing" else "invalid_value"
    return ErrorAnswer(400, where + message, "invalid_request_error", code, param)


HTTP_MESSAGES = {
    404: "There is nothing at this address. The addresses of the API begin with /v1.",
}


async def _answer_expected(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        # FastAPI says first where the field was: in the body, the query or the path.
        problems = [problem | {"loc": problem["loc"][1:]} for problem in error.errors()]
        return invalid_fields(problems).response(request.scope)
    return answer(error).response(request.scope)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = HTTP_MESSAGES.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods_of(request)):
        headers["Allow"] = ", ".join(methods)
        message = f"This address takes {' or '.join(methods)}, not {request.method}."
    return ErrorAnswer(
        error.status_code, message, "invalid_request_error", headers=headers
    ).response(request.scope)


def _methods_of(request: Request) -> list[str]:
    """Every method of the address: FastAPI names those of one of its routes."""
    path = getattr(request.scope.get("route"), "path_format", "")
    operations = request.app.openapi()["paths"].get(path, {})
    return sorted(method.upper() for method in operations)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client left before its body was complete; nobody reads this."""
    return Response(status_code=400)


def install(application: FastAPI) -> None:
    """Make `application` answer every expected failure in the envelope."""
    application.add_exception_handler(PlatformError, _answer_expected)
    application.add_exception_handler(ValidationError, _answer_expected)
    application.add_exception_handler(RequestValidationError, _answer_expected)
    application.add_exception_handler(HTTPException, _answer_http)
    application.add_exception_handler(ClientDisconnect, _answer_nobody)


def locations(error: BaseException) -> list[str]:
    """Where an error passed, as `file:line function`.

    Its message is left out on purpose: a driver's message may carry a parameter, which may be a
    prompt or a key.
    """
    trace = error.__traceback__
    places: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return places


class ErrorBoundary:
    """ASGI middleware that answers 500 for what nobody expected, and logs where it happened.

    It stands inside CORS and the request id, so that a 500 has both (Starlette's own last resort
    stands outside and has neither).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_started = False

        async def noting_send(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except Exception as error:
            log.error(
                "request_failed",
                error=type(error).__name__,
                path=scope["path"],
                locations=locations(error)[-12:],
            )
            if is_started:
                raise ConnectionAbortedError("the response had already started") from None
            await answer(error).response(scope)(scope, receive, send)
