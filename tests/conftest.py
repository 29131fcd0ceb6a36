"""Fixtures that every folder uses: real Redis, real databases, the real default model, a browser.

Servers live as long as the test session (one set per xdist worker). A test that needs them empty
asks for `clean_redis`; every test that asks for `database_url` gets a freshly migrated database of
its own, once on SQLite and once on PostgreSQL.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy
from hypothesis import settings

from common.db import Sessions, create_engine, create_sessions
from tests.services import redis_binaries, running_chromium, running_postgresql, running_redis

settings.register_profile("ncompass", deadline=None)
"""No example has a time limit of its own: on a loaded machine it would be a flaky test."""
settings.load_profile("ncompass")
settings.register_profile("long", max_examples=2_000)
"""`--hypothesis-profile=long`: for state machines that look for hours."""

SHARED_MEMORY = Path("/dev/shm")
ROOM_FOR_TESTS = 8 << 30
CACHE = Path(tempfile.gettempdir()) / f"ncompass-test-cache-{os.getuid()}"


def pytest_configure(config: pytest.Config) -> None:
    """Databases of tests live in memory where there is room: nobody needs them after a power cut.

    On a disk many of them wait longer for fsync than they compute.
    """
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= ROOM_FOR_TESTS:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis server, the one that the product would choose here."""
    with running_redis(next(iter(redis_binaries().values()))) as url:
        yield url


@pytest.fixture
def clean_redis(redis_url: str) -> str:
    """The session's Redis, emptied."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A real PostgreSQL server whose database `template_ncompass` is migrated."""
    from migrations.upgrade import upgrade

    with running_postgresql() as url:
        _execute(url, "CREATE DATABASE template_ncompass")
        upgrade(_with_database(url, "template_ncompass"))
        yield url


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy."""
    from migrations.upgrade import upgrade

    path = tmp_path_factory.mktemp("sqlite") / "template.sqlite3"
    upgrade(f"sqlite+aiosqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """A migrated SQLite database of this test's own."""
    path = tmp_path / "ncompass.sqlite3"
    shutil.copyfile(migrated_sqlite, path)
    return f"sqlite+aiosqlite:///{path}"


@pytest.fixture
def postgresql_database_url(postgresql_url: str) -> Iterator[str]:
    """A migrated PostgreSQL database of this test's own."""
    with postgresql_copy(postgresql_url, "template_ncompass") as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of this test's own, once on each engine that the product supports."""
    names = {"sqlite": "sqlite_url", "postgresql": "postgresql_database_url"}
    url: str = request.getfixturevalue(names[request.param])
    return url


@pytest.fixture
async def sessions(database_url: str) -> AsyncIterator[Sessions]:
    """Sessions on `database_url`."""
    engine = create_engine(database_url)
    yield create_sessions(engine)
    await engine.dispose()


@pytest.fixture(scope="session")
def default_model_directory() -> Path:
    """The default model (SmolLM2-135M-Instruct), converted once per machine and user."""
    from infra.local.default_model import convert_default_model

    CACHE.mkdir(mode=0o700, exist_ok=True)
    with (CACHE / "default-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return convert_default_model(CACHE / "models")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium. Missing: a named skip by hand, a failure in CI.

    For one module only: while Playwright's synchronous API is open it occupies this thread's event
    loop, and no asynchronous test can run.
    """
    try:
        with running_chromium() as chromium:
            yield chromium
    except FileNotFoundError as missing:
        if os.environ.get("CI"):
            pytest.fail(f"browser tests must run in CI: {missing}")
        pytest.skip(f"browser tests need Debian's chromium: {missing}")


@contextmanager
def postgresql_copy(server_url: str, template: str) -> Iterator[str]:
    """A copy of a database; dropped afterwards, whoever is still connected."""
    name = f"test_{os.urandom(6).hex()}"
    _execute(server_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield _with_database(server_url, name)
    _execute(server_url, f"DROP DATABASE {name} WITH (FORCE)")


def _with_database(url: str, database: str) -> str:
    return sqlalchemy.make_url(url).set(database=database).render_as_string(hide_password=False)


def _execute(url: str, statement: str) -> None:
    engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()
