"""The OpenAPI document is complete, and its examples are true."""

from typing import Any

import pytest

from api import examples
from tests.api.conftest import Platform

pytestmark = pytest.mark.asyncio(loop_scope="module")


def operations(platform: Platform) -> list[tuple[str, str, dict[str, Any]]]:
    paths = platform.app.openapi()["paths"]
    return [(method, path, one) for path, ones in paths.items() for method, one in ones.items()]


@pytest.mark.parametrize("path", sorted(examples.REQUESTS))
async def test_the_example_of_every_inference_route_works_as_it_stands(
    shared_platform: Platform, path: str
) -> None:
    shared_platform.say("fine")
    response = await shared_platform.post(path, dict(examples.REQUESTS[path]))
    assert response.status_code == 200, response.text
    if path in examples.ANSWERS:
        assert response.json().keys() >= examples.ANSWERS[path].keys()


@pytest.mark.parametrize("path", sorted(examples.STREAMS))
async def test_a_route_that_streams_says_so(shared_platform: Platform, path: str) -> None:
    content = shared_platform.app.openapi()["paths"][path]["post"]["responses"]["200"]["content"]
    assert "text/event-stream" in content
    body = dict(examples.REQUESTS[path]) | {"stream": True}
    response = await shared_platform.post(path, body)
    assert response.headers["content-type"].startswith("text/event-stream")


async def test_every_error_has_an_example_of_its_own_form(shared_platform: Platform) -> None:
    for method, path, operation in operations(shared_platform):
        for status, told in operation["responses"].items():
            if status.startswith("2"):
                continue
            content = told["content"]["application/json"]
            name = f"{method} {path} {status}"
            is_anthropic = content["schema"]["$ref"].endswith("AnthropicError")
            assert ("request_id" in content["example"]) == is_anthropic, name
            assert content["example"]["error"].keys() == {"message", "type", "param", "code"}, name


async def test_every_operation_says_what_it_does(shared_platform: Platform) -> None:
    for method, path, operation in operations(shared_platform):
        assert operation.get("description"), f"{method} {path}"
        assert operation["tags"], f"{method} {path}"


async def test_a_wrong_method_hears_of_every_right_one(shared_platform: Platform) -> None:
    response = await shared_platform.client.patch("/v1/keys")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, POST"
    response = await shared_platform.client.get("/v1/chat/completions")
    assert response.headers["allow"] == "POST"


async def test_legacy_functions_and_images_are_refused_by_name(shared_platform: Platform) -> None:
    functions = [{"name": "f", "parameters": {"type": "object"}}]
    refused = await shared_platform.chat(functions=functions)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "functions"
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    body = {"model": examples.MODEL, "messages": [{"role": "user", "content": image}]}
    refused = await shared_platform.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content[0].type"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_form_that_is_asked_for_in_another_way_is_not_ignored(
    shared_platform: Platform, path: str
) -> None:
    shared_platform.say("fine")
    body = dict(examples.REQUESTS[path])
    refused = await shared_platform.post(path, body | {"guided_regex": "[0-9]+"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "guided_regex")
    assert "response_format" in error["message"]
    assert (await shared_platform.post(path, body | {"guided_json": None})).status_code == 200
