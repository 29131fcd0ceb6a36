"""What the routes need, built once per process and passed in; torn down in good order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

import structlog
from fastapi import Depends, Request
from redis.asyncio import Redis
from sqlalchemy.exc import SQLAlchemyError

from accounts.api_keys import KeyRing
from accounts.key_cache import KeyCache
from accounts.passwords import PasswordHasher
from accounts.settings import AccountsSettings
from accounts.throttle import Throttle
from api.catalogue import Catalogue
from api.metrics import Metrics
from api.prefixes import Prefixes
from api.running import Running
from api.settings import ApiSettings
from api.tokenizers import Tokenizers
from billing.credit_watch import CreditWatch
from billing.gateways import GatewayLease
from billing.holds import HoldWriter
from billing.settings import BillingSettings
from billing.stripe_settings import StripeSettings
from common.clock import Clock, utc_now_us
from common.db import Sessions, create_engine, create_sessions
from common.errors import PlatformError
from common.ids import new_id
from common.settings import CommonSettings
from engine.broker.gateway import GatewayBroker
from engine.broker.settings import BrokerSettings

log = structlog.get_logger()

LAST_USED_INTERVAL_S = 60.0
SETTLE_AT_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Services:
    """Everything behind the routes of one API process."""

    gateway_id: str
    """Names this process in the queue, in the holds and in the lease they depend on."""
    settings: ApiSettings
    accounts_settings: AccountsSettings
    billing_settings: BillingSettings
    stripe_settings: StripeSettings
    sessions: Sessions
    hold_writer: HoldWriter
    credit_watch: CreditWatch
    broker: GatewayBroker
    catalogue: Catalogue
    tokenizers: Tokenizers
    key_ring: KeyRing
    key_cache: KeyCache
    password_hasher: PasswordHasher
    throttle: Throttle
    running: Running
    prefixes: Prefixes
    metrics: Metrics
    clock: Clock


@asynccontextmanager
async def open_services(
    *,
    common: CommonSettings,
    accounts: AccountsSettings,
    billing: BillingSettings,
    stripe: StripeSettings,
    broker: BrokerSettings,
    api: ApiSettings,
    clock: Clock = utc_now_us,
) -> AsyncIterator[Services]:
    """Open the database, Redis and the background tasks; close them in the opposite order.

    Closing waits at most `drain_timeout_s` for running requests, cuts and voids the rest, and only
    then takes away what their settlements need.
    """
    async with AsyncExitStack() as stack:
        engine = create_engine(common.database_url.get_secret_value())
        stack.push_async_callback(engine.dispose)
        sessions = create_sessions(engine)
        redis = Redis.from_url(common.redis_url.get_secret_value())
        stack.push_async_callback(redis.aclose)
        services = _assemble(
            sessions=sessions,
            redis=redis,
            accounts=accounts,
            billing=billing,
            stripe=stripe,
            broker=broker,
            api=api,
            clock=clock,
        )
        stack.callback(services.password_hasher.close)
        lease = GatewayLease(sessions, services.gateway_id, lease_s=billing.gateway_lease_s)
        # The lease exists before the first hold can name it.
        await lease.renew()
        stack.push_async_callback(_release, lease)
        await services.hold_writer.start()
        stack.push_async_callback(services.hold_writer.stop)
        await services.broker.start()
        stack.push_async_callback(services.broker.stop)
        await stack.enter_async_context(_repeating(billing.gateway_renew_every_s, lease.renew))
        await stack.enter_async_context(
            _repeating(billing.credit_look_every_s, services.credit_watch.look)
        )
        await stack.enter_async_context(
            _repeating(LAST_USED_INTERVAL_S, services.key_cache.record_last_used)
        )
        stack.push_async_callback(_drain, services)
        services.running.start(_preload(services))
        log.info("gateway_open", gateway=services.gateway_id)
        yield services


def _assemble(
    *,
    sessions: Sessions,
    redis: Redis,
    accounts: AccountsSettings,
    billing: BillingSettings,
    stripe: StripeSettings,
    broker: BrokerSettings,
    api: ApiSettings,
    clock: Clock,
) -> Services:
    gateway_id = new_id("gw")
    key_ring = KeyRing(accounts.api_key_peppers)
    running = Running()
    return Services(
        gateway_id=gateway_id,
        settings=api,
        accounts_settings=accounts,
        billing_settings=billing,
        stripe_settings=stripe,
        sessions=sessions,
        hold_writer=HoldWriter(
            sessions,
            max_group=billing.max_group,
            settle_patience_s=billing.settle_patience_s,
            clock=clock,
        ),
        credit_watch=CreditWatch(sessions),
        broker=GatewayBroker(redis, gateway_id, settings=broker),
        catalogue=Catalogue(sessions, ttl_s=api.catalogue_ttl_s),
        tokenizers=Tokenizers(
            tokenizers_max=api.tokenizers_max, concurrency=api.tokenize_concurrency
        ),
        key_ring=key_ring,
        key_cache=KeyCache(sessions, key_ring, clock=clock),
        password_hasher=PasswordHasher(accounts),
        throttle=Throttle(redis, accounts),
        running=running,
        prefixes=Prefixes(),
        metrics=Metrics(running),
        clock=clock,
    )


async def _preload(services: Services) -> None:
    """Load the tokenizers of the live models before their first requests wait for them."""
    for listing in (await services.catalogue.listings()).values():
        try:
            await services.tokenizers.get(listing.text_model)
        except (PlatformError, OSError, ValueError) as error:
            log.warning("tokenizer_not_loaded", model=listing.model.name, error=str(error))


async def _drain(services: Services) -> None:
    await services.running.close(
        drain_s=services.settings.drain_timeout_s, settle_s=SETTLE_AT_CLOSE_S
    )
    log.info("gateway_drained", gateway=services.gateway_id)


async def _release(lease: GatewayLease) -> None:
    """Hand over what is left open now, and not only when the lease runs out."""
    try:
        await lease.release()
    except SQLAlchemyError as error:
        log.warning("lease_not_released", error=type(error).__name__)


@asynccontextmanager
async def _repeating(
    interval_s: float, work: Callable[[], Awaitable[object]]
) -> AsyncIterator[None]:
    """Do `work` every `interval_s` while the context is open, whatever one round comes to."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await work()
            except Exception as error:  # the next round may succeed; the name says what to look at
                log.warning("round_failed", work=work.__qualname__, error=type(error).__name__)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def services_of(request: Request) -> Services:
    """The services that `create_app` was given."""
    # NOTE: async although it waits for nothing: FastAPI runs other dependencies in a thread.
    services: Services = request.app.state.services
    return services


ServicesDependency = Annotated[Services, Depends(services_of)]
