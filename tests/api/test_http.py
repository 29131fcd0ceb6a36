"""What every answer has: the envelope, ids, CORS, both spellings of an address."""

import pytest
import sqlalchemy.exc

from tests.api.conftest import MODEL, Platform
from tests.api.test_validation import assert_envelope


async def test_unknown_addresses_and_methods_answer_in_the_envelope(platform: Platform) -> None:
    assert_envelope(await platform.client.get("/v1/nothing"), 404)
    wrong_method = await platform.client.get("/v1/chat/completions")
    assert_envelope(wrong_method, 405)
    assert "takes POST, not GET" in wrong_method.json()["error"]["message"]
    assert_envelope(await platform.client.put("/v1/models"), 405)
    assert (await platform.client.head("/v1/models")).status_code in (200, 405)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic abc", "sk_ncompass_x", "Bearer sk_ncompass_wrong",
     "Bearer " + "x" * 10_000],
)  # fmt: skip
async def test_a_missing_or_wrong_key_is_401_before_the_body_is_read(
    platform: Platform, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    response = await platform.client.post(
        "/v1/chat/completions", content=b"not json", headers=headers
    )
    error = assert_envelope(response, 401)
    assert error["code"] == "invalid_api_key"
    assert error["type"] == "invalid_request_error"
    if authorization and len(authorization) > 20:
        assert authorization.removeprefix("Bearer ") not in response.text


async def test_a_well_formed_key_of_nobody_is_401(platform: Platform) -> None:
    from accounts import key_format

    headers = {"authorization": f"Bearer {key_format.generate()}"}
    assert_envelope(await platform.client.get("/v1/credits", headers=headers), 401)


async def test_an_unknown_model_is_404_and_named(platform: Platform) -> None:
    for path, extra in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        error = assert_envelope(await platform.post(path, {"model": "no/such"} | extra), 404)
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "no/such" in error["message"]
    assert_envelope(await platform.client.get("/v1/models/no/such"), 404)


async def test_models_are_open_and_priced(platform: Platform) -> None:
    for path in ("/v1/models", "/v1/models/"):
        content = (await platform.client.get(path)).json()
        assert content["object"] == "list"
        (model,) = content["data"]
    assert model["id"] == MODEL
    assert model["object"] == "model"
    assert model["owned_by"] == "HuggingFaceTB"
    assert isinstance(model["created"], int)
    assert model["context_length"] == 8192
    assert model["pricing"]["prompt"] == "0.00000002"
    assert model["pricing"]["input_cache_read"] == "0.00000001"
    assert model["pricing"]["completion"] == "0.00000008"
    assert (await platform.client.get(f"/v1/models/{MODEL}")).json() == model
    assert (await platform.client.get(f"/v1/models/{MODEL}/")).json() == model


async def test_health_needs_no_key(platform: Platform) -> None:
    for path in ("/health", "/health/"):
        response = await platform.client.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_both_spellings_of_an_address_are_served(platform: Platform) -> None:
    platform.say("yes")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    response = await platform.post("/v1/chat/completions/", body)
    assert response.status_code == 200
    credit = await platform.client.get("/v1/credits/", headers=platform.customer.headers)
    assert credit.status_code == 200


async def test_every_answer_has_an_id_of_its_own(platform: Platform) -> None:
    ids = set()
    for path in ("/health", "/v1/models", "/nowhere", "/v1/credits"):
        response = await platform.client.get(path, headers={"x-request-id": "forged\tline"})
        ids.add(response.headers["x-request-id"])
    assert len(ids) == 4
    assert all(request_id.startswith("req_") for request_id in ids)


async def test_browsers_of_other_origins_may_call(platform: Platform) -> None:
    preflight = await platform.client.options(
        "/v1/chat/completions",
        headers={
            "origin": "https://example.com",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        },
    )
    assert preflight.status_code == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    origin = {"origin": "https://example.com"}
    for path in ("/v1/credits", "/nowhere"):
        response = await platform.client.get(path, headers=origin)
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


async def test_a_bug_answers_500_without_details(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def explode() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(type(platform.services.catalogue), "listings", lambda self: explode())
    response = await platform.client.get("/v1/models", headers={"origin": "https://example.com"})
    error = assert_envelope(response, 500)
    assert error["code"] == "internal_error"
    assert "secret detail" not in response.text
    assert response.headers["x-request-id"]
    assert response.headers["access-control-allow-origin"] == "*"


async def test_a_database_that_is_away_is_503(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise sqlalchemy.exc.OperationalError("SELECT 1", {}, Exception("password=hunter2"))

    monkeypatch.setattr(type(platform.services.catalogue), "listings", lambda self: away())
    response = await platform.client.get("/v1/models")
    assert_envelope(response, 503)
    assert response.headers["retry-after"]
    assert response.headers["x-should-retry"] == "true"
    assert "hunter2" not in response.text


async def test_a_key_without_the_scope_is_403(platform: Platform) -> None:
    inference = await platform.issue(platform.customer, "inference")
    account = await platform.issue(platform.customer, "account")
    assert_envelope(await platform.client.get("/v1/keys", headers=inference.headers), 403)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    assert_envelope(await platform.post("/v1/chat/completions", body, customer=account), 403)
    assert_envelope(
        await platform.client.get("/v1/admin/workers", headers=platform.customer.headers), 403
    )


async def test_the_openapi_document_describes_every_route(platform: Platform) -> None:
    document = (await platform.client.get("/v1/openapi.json")).json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    assert "messages" in schemas[reference.rsplit("/", 1)[1]]["properties"]
    assert "402" in chat["responses"]
    assert not any(
        "422" in operation["responses"]
        for path in document["paths"].values()
        for operation in path.values()
    )
    for reference in _references(document):
        assert reference.rsplit("/", 1)[1] in schemas, reference


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in _references(value)]
    if isinstance(node, list):
        return [found for value in node for found in _references(value)]
    return []


async def test_a_model_is_listed_in_the_precision_that_it_is_computed_in(
    platform: Platform,
) -> None:
    listed = (await platform.client.get("/v1/models")).json()["data"]
    assert {model["id"]: model["quantization"] for model in listed} == {MODEL: "bfloat16"}


async def test_a_name_that_is_nearly_right_is_offered(platform: Platform) -> None:
    answer = await platform.chat(model=f"{MODEL}-instruct")
    assert answer.status_code == 404
    assert f"Did you mean '{MODEL}'?" in answer.json()["error"]["message"]
