"""The catalogue of hosted models and of wishes, on SQLite and PostgreSQL."""

import pytest

from common.db import Sessions
from engine import catalog
from engine.catalog import HostedModel, TooManyModelRequests
from engine.errors import ModelNotFound


async def host(
    sessions: Sessions, name: str, path: str = "/models/a", base: str | None = None
) -> HostedModel:
    async with sessions.begin() as session:
        return await catalog.add_model(
            session,
            name=name,
            path=path,
            revision="r1",
            architecture="LlamaForCausalLM",
            context_length=8192,
            dtype="fp32",
            base=base,
        )


async def test_a_hosted_model_is_found_by_name(sessions: Sessions) -> None:
    await host(sessions, "org/b")
    await host(sessions, "org/a")
    async with sessions() as session:
        assert (await catalog.find(session, "org/b")).context_length == 8192
        assert [model.name for model in await catalog.live_models(session)] == ["org/a", "org/b"]


async def test_hosting_a_name_again_moves_it(sessions: Sessions) -> None:
    first = await host(sessions, "org/a", "/models/old")
    again = await host(sessions, "org/a", "/models/new")
    assert again.id == first.id
    async with sessions() as session:
        assert [model.path for model in await catalog.live_models(session)] == ["/models/new"]


@pytest.mark.parametrize("state", ["draining", "removed"])
async def test_a_model_that_is_not_live_is_not_found(
    sessions: Sessions, state: catalog.ModelState
) -> None:
    await host(sessions, "org/a")
    async with sessions.begin() as session:
        await catalog.set_state(session, "org/a", state)
    async with sessions.begin() as session:
        assert await catalog.live_models(session) == []
        with pytest.raises(ModelNotFound):
            await catalog.find(session, "org/a")
        await catalog.set_state(session, "org/a", "live")
        assert (await catalog.find(session, "org/a")).state == "live"


async def test_an_adapter_is_live_only_beside_its_base(sessions: Sessions) -> None:
    await host(sessions, "org/base")
    await host(sessions, "org/tuned", base="org/base")
    async with sessions.begin() as session:
        await catalog.set_state(session, "org/tuned", "removed")
        await catalog.set_state(session, "org/base", "draining")
    with pytest.raises(ModelNotFound, match="org/base"):
        await host(sessions, "org/late", base="org/base")
    async with sessions.begin() as session:
        with pytest.raises(ModelNotFound, match="org/base"):
            await catalog.set_state(session, "org/tuned", "live")
        await catalog.set_state(session, "org/base", "live")
        await catalog.set_state(session, "org/tuned", "live")


async def test_an_unknown_model_is_not_found(sessions: Sessions) -> None:
    async with sessions() as session:
        with pytest.raises(ModelNotFound):
            await catalog.find(session, "org/none")
        with pytest.raises(ModelNotFound):
            await catalog.set_state(session, "org/none", "removed")


async def test_an_organization_sees_its_own_wishes_and_the_operator_all(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        await catalog.request_model(session, name="org/a", organization_id="org_1", reason="why")
        await catalog.request_model(session, name="org/b", organization_id="org_2")
        await catalog.request_model(session, name="org/c", email="a@b.example")
    async with sessions() as session:
        own = await catalog.list_requests(session, organization_id="org_1")
        everybodys = await catalog.list_requests(session, organization_id=None)
    assert [(wish.name, wish.reason, wish.status) for wish in own] == [("org/a", "why", "open")]
    assert {wish.name for wish in everybodys} == {"org/a", "org/b", "org/c"}


async def test_the_same_wish_is_noted_once(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        first = await catalog.request_model(session, name="org/a", organization_id="org_1")
        again = await catalog.request_model(session, name="org/a", organization_id="org_1")
        others = await catalog.request_model(session, name="org/a", organization_id="org_2")
    assert first.id == again.id != others.id


async def test_open_wishes_of_one_organization_have_a_limit(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        for i in range(catalog.MAX_OPEN_REQUESTS):
            await catalog.request_model(session, name=f"org/{i}", organization_id="org_1")
        with pytest.raises(TooManyModelRequests):
            await catalog.request_model(session, name="org/more", organization_id="org_1")
        await catalog.request_model(session, name="org/more", organization_id="org_2")
