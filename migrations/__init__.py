"""One history of the schema, for SQLite and PostgreSQL."""
