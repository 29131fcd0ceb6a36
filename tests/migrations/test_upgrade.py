import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from migrations.upgrade import metadata, synchronous_url, upgrade


def test_the_migrations_lead_to_exactly_the_tables_of_the_code(database_url: str) -> None:
    engine = sqlalchemy.create_engine(synchronous_url(database_url))
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), metadata)
    engine.dispose()
    assert differences == []


def test_upgrading_a_new_database_changes_nothing(database_url: str) -> None:
    upgrade(database_url)
    upgrade(database_url)
