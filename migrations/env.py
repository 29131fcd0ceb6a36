"""Alembic's entry point. `migrations.upgrade` calls it with a locked connection."""

from alembic import context

from migrations.upgrade import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
