"""Bring a database to the newest schema."""

from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection

from accounts import models as _accounts
from billing import models as _billing
from billing import payment_models as _payments
from common import outbox as _outbox
from common.db import Base
from engine import additions as _additions
from engine import catalog as _catalog

__all__ = ["metadata", "synchronous_url", "upgrade"]

_TABLES = (
    _accounts,
    _billing,
    _payments,
    _additions,
    _catalog,
    _outbox,
)  # importing them fills the metadata

metadata = Base.metadata
"""Every table that the code knows; the migrations must lead to exactly this."""

MIGRATION_LOCK = 0x6E436F6D  # any number that only this program uses


def synchronous_url(database_url: str) -> URL:
    """The same database by a driver that Alembic can use."""
    url = sqlalchemy.make_url(database_url)
    return url.set(drivername="sqlite") if url.get_backend_name() == "sqlite" else url


def upgrade(database_url: str, revision: str = "head") -> None:
    """Apply the missing migrations; several processes may call it at once."""
    url = synchronous_url(database_url)
    if url.get_backend_name() == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.connect() as connection:
            _lock(connection)
            command.upgrade(_config(connection), revision)
            connection.commit()
    finally:
        engine.dispose()


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _lock(connection: Connection) -> None:
    """One migration at a time: an advisory lock on PostgreSQL, the write lock on SQLite."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
        return
    connection.exec_driver_sql("PRAGMA busy_timeout = 30000")
    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    connection.commit()
    driver_connection = connection.connection.driver_connection
    assert driver_connection is not None
    driver_connection.isolation_level = None  # Python's sqlite3 would commit before each DDL
    connection.exec_driver_sql("BEGIN IMMEDIATE")
