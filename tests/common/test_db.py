import time

from sqlalchemy import select

from common.db import Sessions, database_now_us, read_only


async def test_the_database_clock_tells_utc_microseconds(sessions: Sessions) -> None:
    async with sessions() as session:
        now_us = (await session.execute(select(database_now_us()))).scalar_one()
    assert abs(now_us - time.time_ns() // 1000) < 2_000_000


async def test_reading_does_not_wait_for_a_writer(sessions: Sessions) -> None:
    async with sessions() as writer:
        await writer.execute(select(1))  # holds SQLite's write lock
        async with read_only(sessions) as reader:
            assert (await reader.execute(select(1))).scalar_one() == 1
