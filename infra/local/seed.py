"""What a new database needs before anybody signs up: the default model and two accounts."""

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from accounts import api_keys, users
from accounts.api_keys import KeyRing
from accounts.errors import AccountError
from accounts.models import Membership
from accounts.passwords import PasswordHasher
from accounts.principal import ACCOUNT, INFERENCE, OPERATOR
from accounts.settings import AccountsSettings
from billing import pricing, signup
from billing.errors import PriceNotFound
from billing.money import parse_usd
from billing.settings import BillingSettings
from common.db import create_engine, create_sessions
from engine import catalog
from engine.errors import ModelNotFound
from infra.local.default_model import DEFAULT_MODEL, DESCRIPTION, LICENCE
from infra.local.model_files import read_model_facts
from infra.local.secret_store import Secrets, with_keys

DEMO_EMAIL = "demo@example.com"
OPERATOR_EMAIL = "operator@example.com"
INPUT_PRICE, CACHED_PRICE, OUTPUT_PRICE = "0.02", "0.005", "0.06"
"""Dollars per million tokens of the default model."""


@dataclass(frozen=True, slots=True)
class Seeder:
    """The settings that seeding goes by."""

    database_url: str
    accounts: AccountsSettings
    billing: BillingSettings

    async def seed(self, var: Path, secrets: Secrets, default_model: Path) -> Secrets:
        """Make what is missing; returns the secrets with both accounts' keys."""
        engine = create_engine(self.database_url)
        hasher = PasswordHasher(self.accounts)
        key_ring = KeyRing(self.accounts.api_key_peppers)
        try:
            async with create_sessions(engine).begin() as session:
                await _host_default_model(session, default_model)
                demo = await self._account(
                    session,
                    hasher,
                    key_ring,
                    email=DEMO_EMAIL,
                    password=secrets.demo_password,
                    known_key=secrets.demo_api_key,
                    scopes=(INFERENCE, ACCOUNT),
                )
                operator = await self._account(
                    session,
                    hasher,
                    key_ring,
                    email=OPERATOR_EMAIL,
                    password=secrets.operator_password,
                    known_key=secrets.operator_api_key,
                    scopes=(INFERENCE, ACCOUNT, OPERATOR),
                )
        finally:
            hasher.close()
            await engine.dispose()
        return with_keys(var, secrets, demo=demo, operator=operator)

    async def _account(
        self,
        session: AsyncSession,
        hasher: PasswordHasher,
        key_ring: KeyRing,
        *,
        email: str,
        password: str,
        known_key: str,
        scopes: tuple[str, ...],
    ) -> str:
        """The account's working key: the known one, else a new one."""
        if known_key and await _works(session, known_key, key_ring):
            return known_key
        user = await users.find_by_email(session, email)
        if user is None:
            signed_up = await signup.sign_up(
                session,
                email=email,
                password=password,
                hasher=hasher,
                key_ring=key_ring,
                accounts_settings=self.accounts,
                billing_settings=self.billing,
            )
            organization_id = signed_up.organization.id
            if set(scopes) == {INFERENCE, ACCOUNT}:
                return signed_up.issued_key.plaintext
            user = signed_up.user
        else:
            organization_id = (
                await session.scalars(
                    select(Membership.organization_id).where(Membership.user_id == user.id)
                )
            ).first() or ""
        issued = await api_keys.issue(
            session,
            organization_id,
            name="Set up on this machine",
            scopes=scopes,
            created_by=user.id,
            key_ring=key_ring,
        )
        return issued.plaintext


async def _works(session: AsyncSession, key: str, key_ring: KeyRing) -> bool:
    try:
        await api_keys.authenticate(session, key, key_ring)
    except AccountError:
        return False
    return True


async def _host_default_model(session: AsyncSession, directory: Path) -> None:
    facts = read_model_facts(directory)
    try:
        known = await catalog.find(session, DEFAULT_MODEL)
    except ModelNotFound:
        known = None
    if known is None or (known.path, known.licence) != (str(directory), LICENCE):
        await catalog.add_model(
            session,
            name=DEFAULT_MODEL,
            path=str(directory),
            revision=facts.revision,
            architecture=facts.architecture,
            context_length=facts.context_length,
            dtype=facts.dtype,
            description=DESCRIPTION,
            kind=facts.kind,
            licence=LICENCE,
        )
    try:
        await pricing.current_price(session, DEFAULT_MODEL)
    except PriceNotFound:
        await pricing.set_price(
            session,
            DEFAULT_MODEL,
            input=parse_usd(INPUT_PRICE),
            cached=parse_usd(CACHED_PRICE),
            output=parse_usd(OUTPUT_PRICE),
        )
