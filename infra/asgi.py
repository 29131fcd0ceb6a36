"""One process: the API under `/v1`, the pages under `/`, metrics on a port of their own.

`infra.api_server` runs it, and `uvicorn infra.asgi:create_application --factory` does. The lifespan
opens what both need, once, and closes it after the last request.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from redis.asyncio import Redis
from starlette.types import ASGIApp, Receive, Scope, Send

from accounts import key_format
from accounts.settings import AccountsSettings
from api.app import create_app as create_api
from api.dependencies import Services, open_services
from api.metrics import metrics_application
from api.settings import ApiSettings
from billing.settings import BillingSettings
from billing.stripe_client import Payments
from billing.stripe_settings import StripeSettings
from common import logging as platform_logging
from common.settings import CommonSettings
from engine.broker.settings import BrokerSettings
from infra.settings import InfraSettings
from web.app import create_app as create_web
from web.services import WebServices
from web.settings import WebSettings

logger = structlog.get_logger(__name__)

BRAND = key_format.BRAND.encode()


def create_application() -> ASGIApp:
    """The whole HTTP side of the platform, configured by the environment."""
    common = CommonSettings()
    platform_logging.configure(common, process="api")
    return Platform(common, InfraSettings())


class Platform:
    """Sends `/v1` and `/health` to the API and everything else to the pages.

    What comes with an API key is the API's, too: a client whose base URL lacks `/v1` understands no
    page.
    """

    def __init__(self, common: CommonSettings, infra: InfraSettings) -> None:
        self._common = common
        self._infra = infra
        self._api: FastAPI | None = None
        self._web: FastAPI | None = None
        # Starlette speaks the lifespan protocol; the two applications are made inside of it.
        self._lifespan = FastAPI(lifespan=self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, or the lifespan of the process."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        assert self._api is not None
        assert self._web is not None
        path = scope["path"]
        is_api = (
            path == "/v1"
            or path.startswith("/v1/")
            or path.rstrip("/") == "/health"
            or _has_key(scope)
        )
        await (self._api if is_api else self._web)(scope, receive, send)

    @asynccontextmanager
    async def _open(self, application: FastAPI) -> AsyncIterator[None]:
        stripe = StripeSettings()
        async with AsyncExitStack() as stack:
            services = await stack.enter_async_context(
                open_services(
                    common=self._common,
                    accounts=AccountsSettings(),
                    billing=BillingSettings(),
                    stripe=stripe,
                    broker=BrokerSettings(),
                    api=ApiSettings(),
                )
            )
            redis = Redis.from_url(self._common.redis_url.get_secret_value())
            stack.push_async_callback(redis.aclose)
            self._api = create_api(services)
            payments = Payments(stripe) if stripe.is_on else None
            if payments is not None:
                stack.push_async_callback(payments.close)
            document = self._api.openapi()
            self._web = create_web(_web_services(services, redis, payments, document))
            if self._infra.metrics_port:
                await stack.enter_async_context(_metrics_server(services, self._infra))
            yield


def _web_services(
    services: Services, redis: Redis, payments: Payments | None, document: Mapping[str, Any]
) -> WebServices:
    return WebServices(
        sessions=services.sessions,
        redis=redis,
        password_hasher=services.password_hasher,
        throttle=services.throttle,
        key_ring=services.key_ring,
        accounts_settings=services.accounts_settings,
        billing_settings=services.billing_settings,
        web_settings=WebSettings(),  # the cookie secret comes from the environment
        broker=services.broker,
        payments=payments,
        clock=services.clock,
        api_document=document,
    )


class _QuietServer(uvicorn.Server):
    """A second server in the process; signals are the first one's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _metrics_server(services: Services, settings: InfraSettings) -> AsyncIterator[None]:
    """Serve Prometheus on a loopback port while the process runs."""
    config = uvicorn.Config(
        metrics_application(services.metrics, services.broker),
        host=settings.metrics_host,
        port=settings.metrics_port,
        lifespan="off",
        log_config=None,
        access_log=False,
    )
    server = _QuietServer(config)
    task = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.should_exit = True
        await task


def _has_key(scope: Scope) -> bool:
    """Whether a key of ours comes with it; other credentials may be of a proxy in front."""
    sent = (value for name, value in scope["headers"] if name in (b"authorization", b"x-api-key"))
    return any(BRAND in value for value in sent)
