import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import CheckConstraint, inspect

from migrations.upgrade import metadata, synchronous_url, upgrade


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without any table."""
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path / 'new' / 'empty.sqlite3'}"
        return
    server = request.getfixturevalue("postgresql_url")
    engine = sqlalchemy.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE empty_of_tables TEMPLATE template0")
        url = sqlalchemy.make_url(server).set(database="empty_of_tables")
        yield url.render_as_string(hide_password=False)
        connection.exec_driver_sql("DROP DATABASE empty_of_tables WITH (FORCE)")
    engine.dispose()


def table_names(database_url: str) -> set[str]:
    engine = sqlalchemy.create_engine(synchronous_url(database_url))
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_the_migrations_lead_to_exactly_the_tables_of_the_code(database_url: str) -> None:
    engine = sqlalchemy.create_engine(synchronous_url(database_url))
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), metadata)
    engine.dispose()
    assert differences == []


def test_every_check_of_the_code_is_in_the_database(database_url: str) -> None:
    engine = sqlalchemy.create_engine(synchronous_url(database_url))
    inspector = inspect(engine)
    for name, table in metadata.tables.items():
        expected = {
            constraint.name
            for constraint in table.constraints
            if isinstance(constraint, CheckConstraint)
        }
        assert {found["name"] for found in inspector.get_check_constraints(name)} == expected
    engine.dispose()


async def test_processes_that_upgrade_at_once_do_it_once(empty_database_url: str) -> None:
    await asyncio.gather(*(asyncio.to_thread(upgrade, empty_database_url) for _ in range(3)))
    assert table_names(empty_database_url) == {*metadata.tables, "alembic_version"}


def test_an_upgrade_that_breaks_off_leaves_nothing_and_the_next_one_succeeds(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as broken:
        broken.setattr("alembic.op.execute", break_off)
        with pytest.raises(InterruptedError):
            upgrade(empty_database_url)
    assert table_names(empty_database_url) == set()
    upgrade(empty_database_url)
    upgrade(empty_database_url)
    assert table_names(empty_database_url) == {*metadata.tables, "alembic_version"}
