"""The catalogue is young enough, and nobody waits for it while somebody asks."""

import asyncio

import pytest
from sqlalchemy import update

from api import catalogue
from api.catalogue import Catalogue
from common.db import Sessions
from engine.catalog import HostedModel, live_models
from engine.errors import ModelNotFound
from tests.api.conftest import MODEL, Platform


async def hide(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        assert await live_models(session)
        await session.execute(update(HostedModel).values(state="removed"))


async def test_what_is_in_use_is_read_again_before_anybody_waits_for_it(
    platform: Platform,
) -> None:
    now_s = [100.0]
    listed = Catalogue(platform.services.sessions, ttl_s=1.0, monotonic=lambda: now_s[0])
    await listed.find(MODEL)
    await hide(platform.services.sessions)
    now_s[0] += 0.5
    await listed.find(MODEL)
    assert listed._reading is None
    now_s[0] += 0.2
    await listed.find(MODEL)  # what is known still holds
    assert listed._reading is not None
    await asyncio.wait({listed._reading})
    with pytest.raises(ModelNotFound):
        await listed.find(MODEL)


async def test_what_nobody_waited_for_may_fail(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    listed = Catalogue(platform.services.sessions, ttl_s=1.0, monotonic=lambda: now_s[0])
    await listed.find(MODEL)
    monkeypatch.setattr(catalogue.catalog, "live_models", None)
    now_s[0] += 0.7
    await listed.find(MODEL)
    assert listed._reading is not None
    await asyncio.wait({listed._reading})
    now_s[0] += 0.4
    with pytest.raises(TypeError):
        await listed.find(MODEL)
