"""Fixtures that every folder uses: a real Redis, a real PostgreSQL, a migrated database on each."""
