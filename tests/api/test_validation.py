"""Everything is validated before the engine: hostile bodies get 400, and the next request is served."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.api.conftest import MODEL, Platform

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Hi"}]
BASE = {"model": MODEL, "messages": MESSAGES}


async def raw(
    platform: Platform, body: bytes, path: str = "/v1/chat/completions"
) -> httpx.Response:
    headers = platform.customer.headers | {"content-type": "application/json"}
    return await platform.client.post(path, content=body, headers=headers)


def assert_envelope(response: httpx.Response, status: int, param: str | None = None) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    assert set(content) == {"error"}
    error = content["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    if param is not None:
        assert error["param"] == param
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'"x"', b"42", b"null", b"{", b"\xff\xfe", b"{}x", b"\xef\xbb\xbf{}",
        b'{"model": "m", "temperature": NaN}', b'{"model": "m", "temperature": 1e999}',
        b'{"model": "m", "temperature": -Infinity}', b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83dabc"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b"[" * 100_000, b'{"a":' * 1_000 + b"1" + b"}" * 1_000,
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
async def test_what_is_not_a_json_object_is_400(shared_platform: Platform, body: bytes) -> None:
    assert_envelope(await raw(shared_platform, body), 400)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[1].content[0].text"),
        ({"model": 7}, "model"),
        ({"model": None}, "model"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1_000}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1e18}, "max_tokens"),
        ({"max_tokens": 2**64}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1_001]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
async def test_a_wrong_value_is_400_with_its_path(
    shared_platform: Platform, change: dict[str, Any], param: str
) -> None:
    body = json.dumps(BASE | change).encode()
    num_before = len(shared_platform.worker.requests)
    assert_envelope(await raw(shared_platform, body), 400, param)
    assert len(shared_platform.worker.requests) == num_before
    assert (await shared_platform.balance()).held == 0


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [1.5],
        ["a", 1],
        [1, "a"],
        [-1],
        [49152],
        [[]],
        [[1], "a"],
        {"a": 1},
        5,
        [[1.0]],
    ],
    ids=json.dumps,
)
async def test_a_wrong_prompt_is_400(shared_platform: Platform, prompt: Any) -> None:
    body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
    error = assert_envelope(await raw(shared_platform, body, "/v1/completions"), 400)
    assert error["param"].startswith("prompt")


async def test_a_prompt_beyond_the_context_says_so_in_the_phrase_that_clients_seek(
    shared_platform: Platform,
) -> None:
    for content in ("word " * 9_000, "x" * 7_000_000):
        error = assert_envelope(await shared_platform.chat(content), 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]


async def test_a_body_beyond_the_limit_is_413_in_seconds(shared_platform: Platform) -> None:
    started_s = time.monotonic()
    error = assert_envelope(await raw(shared_platform, b'{"x": "' + b"y" * 20_000_000 + b'"}'), 413)
    assert error["code"] == "request_too_large"
    assert time.monotonic() - started_s < 5


async def test_ten_thousand_messages_are_answered_in_seconds(shared_platform: Platform) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES * 10_000}).encode()
    started_s = time.monotonic()
    assert_envelope(await raw(shared_platform, body), 400)
    assert time.monotonic() - started_s < 8


async def test_a_compressed_body_is_415(shared_platform: Platform) -> None:
    headers = shared_platform.customer.headers | {"content-encoding": "gzip"}
    response = await shared_platform.client.post(
        "/v1/chat/completions", content=b"x", headers=headers
    )
    assert_envelope(response, 415)


@pytest.mark.parametrize("kind", [[], {}, 1, None, True, "x" * 1_000])
async def test_a_kind_that_is_no_word_is_400(shared_platform: Platform, kind: Any) -> None:
    question = [{"role": "user", "content": [{"type": kind, "text": "x"}]}]
    bodies = {
        "/v1/messages": {"max_tokens": 5, "messages": question},
        "/v1/chat/completions": {"messages": question, "response_format": {"type": kind}},
        "/v1/responses": {"input": [{"type": kind, "content": "x"}], "text": {"format": kind}},
    }
    for path, body in bodies.items():
        answer = await shared_platform.post(path, {"model": MODEL} | body)
        assert answer.status_code == 400, (path, answer.text)


async def test_after_all_that_the_next_request_is_served(shared_platform: Platform) -> None:
    shared_platform.say("still here")
    for body in (b"{", b"[" * 50_000, json.dumps(BASE | {"n": 10**30}).encode()):
        assert_envelope(await raw(shared_platform, body), 400)
    answer = await shared_platform.chat()
    assert answer.json()["choices"][0]["message"]["content"] == "still here"


async def test_an_error_never_repeats_what_was_sent(shared_platform: Platform) -> None:
    canary = "canary-7f3a"
    for change in ({"stop": {canary: 1}}, {"messages": [{"role": canary, "content": canary}]}):
        response = await raw(shared_platform, json.dumps(BASE | change).encode())
        assert canary not in response.text


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            b'{"a": 1e999}',
            "out of range: number is infinity when parsed as double: line 1 column 7",
        ),
        (b'{"a": "\\ud83d"}', "no low surrogate in string: line 1 column 8"),
        (b'{"a": "\\ud83d b"}', "no low surrogate in string: line 1 column 8"),
        (b'{"a": NaN}', "invalid character (byte 6)"),
        (b'{"a": "b', "Input data was truncated"),
        (b"[" * 200, "Input data was truncated"),
    ],
)
async def test_a_body_that_is_no_json_is_told_where_it_is_wrong(
    shared_platform: Platform, body: bytes, told: str
) -> None:
    response = await shared_platform.client.post(
        "/v1/chat/completions", content=body, headers=shared_platform.customer.headers
    )
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
