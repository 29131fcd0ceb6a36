from billing.models import Gateway
from common.db import Sessions
from common.upsert import insert_or_ignore


async def test_the_second_of_two_equal_rows_is_ignored_and_said_so(sessions: Sessions) -> None:
    row = {"id": "gw_1", "lease_until": 1, "started_at": 1}
    async with sessions.begin() as session:
        assert await insert_or_ignore(session, Gateway, row)
        assert not await insert_or_ignore(session, Gateway, row)
