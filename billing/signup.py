"""A new account and its free credit, in one transaction.

The credit comes once per inbox, whatever the address's spelling: the claim outlives the account.
"""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from accounts import api_keys, audit, emails, organizations, users, verification
from accounts.api_keys import IssuedKey, KeyRing
from accounts.models import Organization, User
from accounts.passwords import PasswordHasher
from accounts.principal import ACCOUNT, INFERENCE
from accounts.settings import AccountsSettings
from billing import chart, ledger
from billing.ledger import Posting
from billing.models import GrantClaim
from billing.settings import BillingSettings
from common.clock import MICROSECONDS_PER_SECOND, Clock, utc_now_us
from common.upsert import insert_or_ignore

SIGNUP_GRANT = "signup"
MICROSECONDS_PER_DAY = 86_400 * MICROSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True)
class SignedUp:
    """A new customer. The key's plaintext is shown this once."""

    user: User
    organization: Organization
    issued_key: IssuedKey
    granted_nano_usd: int


async def sign_up(
    session: AsyncSession,
    *,
    email: str,
    password: str,
    hasher: PasswordHasher,
    key_ring: KeyRing,
    accounts_settings: AccountsSettings,
    billing_settings: BillingSettings,
    address: str | None = None,
    clock: Clock = utc_now_us,
) -> SignedUp:
    """User, organization, first key and, unless the address must be verified first, the credit.

    Raises InvalidEmail, DisposableEmail, WeakPassword, EmailTaken.
    """
    user = await users.create_user(
        session,
        email=email,
        password=password,
        hasher=hasher,
        settings=accounts_settings,
        clock=clock,
    )
    organization = await organizations.create_organization(
        session, name=user.email, owner=user, clock=clock
    )
    await ledger.open_balance(session, organization.id)
    issued_key = await api_keys.issue(
        session,
        organization.id,
        name="First key",
        scopes=(INFERENCE, ACCOUNT),
        created_by=user.id,
        key_ring=key_ring,
        clock=clock,
    )
    granted = 0
    if accounts_settings.is_email_verification_on:
        await verification.request(session, user, clock=clock)
    else:
        granted = await grant_signup_credit(
            session, user, organization.id, settings=billing_settings, clock=clock
        )
    await audit.record(
        session,
        "user.signed_up",
        organization_id=organization.id,
        user_id=user.id,
        target=user.id,
        address=address,
        granted_nano_usd=granted,
        clock=clock,
    )
    return SignedUp(user, organization, issued_key, granted)


async def verify_email(
    session: AsyncSession,
    token: str,
    *,
    settings: BillingSettings,
    address: str | None = None,
    clock: Clock = utc_now_us,
) -> int:
    """Redeem the link of a verification mail and give the free credit; returns what was given.

    Raises InvalidToken.
    """
    user = await verification.redeem(session, token, clock=clock)
    first, *_ = await organizations.organizations_of(session, user.id)
    granted = await grant_signup_credit(session, user, first.id, settings=settings, clock=clock)
    await audit.record(
        session,
        "user.verified_email",
        organization_id=first.id,
        user_id=user.id,
        target=user.id,
        address=address,
        granted_nano_usd=granted,
        clock=clock,
    )
    return granted


async def grant_signup_credit(
    session: AsyncSession,
    user: User,
    organization_id: str,
    *,
    settings: BillingSettings,
    clock: Clock = utc_now_us,
) -> int:
    """Give the free credit unless this inbox has had it; returns what was given."""
    amount = settings.signup_credit_nano_usd
    days = settings.signup_credit_days
    subject_hash = emails.canonical_hash(user.email)
    claim = {
        "kind": SIGNUP_GRANT,
        "subject_hash": subject_hash,
        "organization_id": organization_id,
        "created_at": clock(),
    }
    if amount == 0 or not await insert_or_ignore(session, GrantClaim, claim):
        return 0
    await ledger.post(
        session,
        key=f"grant:{SIGNUP_GRANT}:{subject_hash}",
        kind="signup_grant",
        organization_id=organization_id,
        postings=[
            Posting(chart.customer(organization_id), amount),
            Posting(chart.PROMOTIONAL_EXPENSE, -amount),
        ],
        actor="platform",
        memo="Free credit for a new account",
        lot_kind="promotional",
        expires_at=None if days is None else clock() + days * MICROSECONDS_PER_DAY,
        clock=clock,
    )
    return amount
