"""Two organizations: every route of the application is walked, and none shows or changes the other."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from fastapi.routing import iter_route_contexts

from accounts import api_keys
from common.db import read_only
from tests.api.conftest import MODEL, PASSWORD, Customer, Platform

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def test_no_route_leaks_between_organizations(platform: Platform) -> None:
    """Ada tries everything against Bob's objects. A new route fails here until it is classified."""
    platform.say("hello")
    bob = await platform.sign_up("bob@example.com")
    generation = (await platform.post("/v1/chat/completions", CHAT, customer=bob)).json()["id"]
    bobs = (bob.organization_id, bob.key_id, bob.email, generation, bob.key)
    before = await platform.balance(bob)
    attempts = _attempts(platform, bob, generation)
    assert set(attempts) == _routes(platform), "classify every route"
    for route, (attempt, allowed) in attempts.items():
        response = await attempt()
        assert response.status_code in allowed, (route, response.status_code, response.text)
        for secret in bobs:
            assert secret not in response.text, (route, secret)
    assert await platform.balance(bob) == before
    async with read_only(platform.services.sessions) as session:
        (key,) = await api_keys.list_keys(session, bob.organization_id)
    assert key.revoked_at is None


def _routes(platform: Platform) -> set[tuple[str, str]]:
    """Method and path of everything that the application answers."""
    return {
        (method, route.path)
        for route in iter_route_contexts(platform.app.routes)
        for method in set(route.methods or ()) - {"HEAD", "OPTIONS"}
    }


Attempt = tuple[Callable[[], Awaitable[httpx.Response]], set[int]]


def _attempts(platform: Platform, bob: Customer, generation: str) -> dict[tuple[str, str], Attempt]:
    """What Ada does at each route to reach Bob's things, and what may come of it."""
    client, mine = platform.client, platform.customer.headers
    # Naming him in headers and queries must change nothing.
    mine = mine | {
        "x-organization": bob.organization_id,
        "openai-organization": bob.organization_id,
    }
    query = {"organization": bob.organization_id, "organization_id": bob.organization_id}

    def get(path: str) -> Callable[[], Awaitable[httpx.Response]]:
        return lambda: client.get(path, headers=mine, params=query)

    def post(path: str, body: dict[str, Any]) -> Callable[[], Awaitable[httpx.Response]]:
        named = body | {"organization_id": bob.organization_id, "tenant": bob.organization_id}
        return lambda: client.post(path, json=named, headers=mine, params=query)

    adjust = {"organization": bob.organization_id, "amount": "-1", "reason": "mine now"}
    prices = {"input_price": "1", "cached_price": "1", "output_price": "1"}
    add_model = {"source": "some/model"} | prices
    sign_up = {"email": bob.email, "password": PASSWORD}
    return {
        ("GET", "/health"): (get("/health"), {200}),
        ("GET", "/v1/openapi.json"): (get("/v1/openapi.json"), {200}),
        ("GET", "/v1/models"): (get("/v1/models"), {200}),
        ("GET", "/v1/models/{model_id:path}"): (get(f"/v1/models/{MODEL}"), {200}),
        ("POST", "/v1/chat/completions"): (post("/v1/chat/completions", CHAT), {200}),
        ("POST", "/v1/messages"): (post("/v1/messages", CHAT | {"max_tokens": 5}), {200}),
        ("POST", "/v1/embeddings"): (
            post("/v1/embeddings", {"model": MODEL, "input": "hi"}),
            {400},  # this model writes
        ),
        ("POST", "/v1/rerank"): (
            post("/v1/rerank", {"model": MODEL, "query": "hi", "documents": ["ho"]}),
            {400},
        ),
        ("POST", "/v1/messages/count_tokens"): (post("/v1/messages/count_tokens", CHAT), {200}),
        ("POST", "/v1/responses"): (post("/v1/responses", {"model": MODEL, "input": "x"}), {200}),
        ("POST", "/v1/quote"): (post("/v1/quote", CHAT), {200}),
        ("POST", "/v1/completions"): (
            post("/v1/completions", {"model": MODEL, "prompt": "x"}),
            {200},
        ),
        ("POST", "/v1/signup"): (post("/v1/signup", sign_up), {400}),
        ("POST", "/v1/password/forgot"): (
            post("/v1/password/forgot", {"email": bob.email}),
            {202},
        ),
        ("POST", "/v1/password/reset"): (
            post("/v1/password/reset", {"token": "guess", "password": PASSWORD}),
            {400},
        ),
        ("GET", "/v1/credits"): (get("/v1/credits"), {200}),
        ("GET", "/v1/keys"): (get("/v1/keys"), {200}),
        ("POST", "/v1/keys"): (post("/v1/keys", {"name": "mine"}), {201}),
        ("DELETE", "/v1/keys/{key_id}"): (
            lambda: client.delete("/v1/keys/" + bob.key_id, headers=mine),
            {404},
        ),
        ("GET", "/v1/usage"): (get("/v1/usage"), {200}),
        ("GET", "/v1/generations/{request_id}"): (get(f"/v1/generations/{generation}"), {404}),
        ("POST", "/v1/model_requests"): (post("/v1/model_requests", {"model": "a/b"}), {201}),
        ("POST", "/v1/admin/credits/adjust"): (post("/v1/admin/credits/adjust", adjust), {403}),
        ("GET", "/v1/usage/statement"): (get("/v1/usage/statement"), {200}),
        ("GET", "/v1/usage/requests"): (get("/v1/usage/requests"), {200}),
        ("GET", "/v1/credits/ledger"): (get("/v1/credits/ledger"), {200}),
        ("GET", "/v1/projects"): (get("/v1/projects"), {200}),
        ("POST", "/v1/projects"): (post("/v1/projects", {"name": "mine"}), {201}),
        ("GET", "/v1/budgets"): (get("/v1/budgets"), {200}),
        ("PUT", "/v1/budgets"): (
            lambda: client.put(
                "/v1/budgets", json={"api_key": bob.key_id, "limit": "1"}, headers=mine
            ),
            {404},
        ),
        ("DELETE", "/v1/budgets/{budget_id}"): (
            lambda: client.delete("/v1/budgets/bud_any", headers=mine),
            {204},
        ),
        ("POST", "/v1/webhooks/stripe"): (post("/v1/webhooks/stripe", {"id": "evt_1"}), {400}),
        ("GET", "/v1/admin/workers"): (get("/v1/admin/workers"), {403}),
        ("POST", "/v1/admin/models"): (post("/v1/admin/models", add_model), {403}),
        ("GET", "/v1/admin/models"): (get("/v1/admin/models"), {403}),
        ("GET", "/v1/admin/models/{addition_id}"): (get("/v1/admin/models/any"), {403}),
    }


async def test_cookies_are_never_a_key(platform: Platform) -> None:
    cookie = {"cookie": f"session={platform.customer.key}; __Host-session={platform.customer.key}"}
    for path in ("/v1/credits", "/v1/keys", "/v1/usage"):
        assert (await platform.client.get(path, headers=cookie)).status_code == 401
