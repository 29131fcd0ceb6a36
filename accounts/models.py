"""The tables of accounts. Times are UTC microseconds; secrets are stored as hashes only."""

from typing import Annotated, Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from common.db import Base

TimestampUs = Annotated[int, mapped_column(BigInteger)]


class User(Base):
    """A person who logs in. `email_canonical` is what may exist once, see `accounts.emails`."""

    __tablename__ = "users"
    __table_args__ = (CheckConstraint("status IN ('active', 'disabled')", name="status"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    email: Mapped[str]
    email_canonical: Mapped[str] = mapped_column(String, unique=True)
    password_hash: Mapped[str]
    email_verified_at: Mapped[TimestampUs | None]
    status: Mapped[str] = mapped_column(String, default="active")
    created_at: Mapped[TimestampUs]


class Organization(Base):
    """The tenant: owns keys, credit and usage. Frozen or closed, it may not spend."""

    __tablename__ = "organizations"
    __table_args__ = (CheckConstraint("status IN ('active', 'frozen', 'closed')", name="status"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    status: Mapped[str] = mapped_column(String, default="active")
    created_at: Mapped[TimestampUs]


class Membership(Base):
    """A user's role in an organization."""

    __tablename__ = "memberships"
    __table_args__ = (
        CheckConstraint("role IN ('owner', 'admin', 'member')", name="role"),
        Index(None, "user_id"),
    )

    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"), primary_key=True)
    role: Mapped[str]


class Session(Base):
    """A logged-in browser. The cookie holds the token, the table only its hash."""

    __tablename__ = "sessions"
    __table_args__ = (Index(None, "user_id"), Index(None, "expires_at"))

    id_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    csrf_token: Mapped[str]
    created_at: Mapped[TimestampUs]
    expires_at: Mapped[TimestampUs]


class Project(Base):
    """A part of an organization that keys can be grouped under."""

    __tablename__ = "projects"
    __table_args__ = (Index(None, "organization_id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    name: Mapped[str]
    created_at: Mapped[TimestampUs]


class ApiKey(Base):
    """An API key: found by its `prefix`, proven by its `mac`; the plaintext is nowhere."""

    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "organization_id", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[str] = mapped_column(ForeignKey("organizations.id"))
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    created_by: Mapped[str | None] = mapped_column(ForeignKey("users.id"))
    name: Mapped[str]
    prefix: Mapped[str] = mapped_column(String, unique=True)
    """`sk_ncompass_` and the key's 12 public characters."""
    mac: Mapped[str] = mapped_column(String, unique=True)
    """HMAC-SHA256 of the whole key under pepper `pepper_version`, hexadecimal."""
    pepper_version: Mapped[int]
    last4: Mapped[str]
    scopes: Mapped[str]
    """Space-separated: inference, account, operator."""
    created_at: Mapped[TimestampUs]
    expires_at: Mapped[TimestampUs | None]
    revoked_at: Mapped[TimestampUs | None]
    last_used_at: Mapped[TimestampUs | None]


class EmailToken(Base):
    """A single-use secret sent to one address; only its hash is kept."""

    __tablename__ = "email_tokens"
    __table_args__ = (Index(None, "user_id"), Index(None, "expires_at"))

    token_hash: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.id"))
    email: Mapped[str]
    purpose: Mapped[str]
    created_at: Mapped[TimestampUs]
    expires_at: Mapped[TimestampUs]
    used_at: Mapped[TimestampUs | None]


class AuditEvent(Base):
    """Who did what to which object, and from where. Append-only; never holds a secret."""

    __tablename__ = "audit_events"
    __table_args__ = (Index(None, "organization_id", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    organization_id: Mapped[str | None]
    user_id: Mapped[str | None]
    api_key_id: Mapped[str | None]
    action: Mapped[str]
    target: Mapped[str | None]
    address: Mapped[str | None]
    facts: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[TimestampUs]
