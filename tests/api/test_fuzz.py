"""Bodies that nobody would write, on every inference route: a clear 4xx, and the next one is served."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import MODEL, Platform

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIELDS: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logprobs": True,
        "top_logprobs": 1,
        "n": 1,
        "stop": ["x"],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1},
        "stream": False,
    },
    "/v1/completions": {"prompt": "x", "echo": True, "best_of": 1, "suffix": "", "logprobs": 1},
    "/v1/messages": {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "system": "x",
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {
        "input": [{"role": "user", "content": "x"}],
        "instructions": "x",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": [],
        "metadata": {"a": "b"},
    },
    "/v1/quote": {"messages": [{"role": "user", "content": "x"}]},
}
COMMON = {"temperature": 1.0, "top_p": 1.0, "seed": 1, "logit_bias": {"5": 1.0}, "min_p": 0.0}

NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "\0", "<|im_end|>", "[" * 50, "x" * 5_000, "\u202e", "{{ 7 * 7 }}"]),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "name"]), inner)
        ),
        max_leaves=8,
    ),
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A good body with one to three places of it replaced."""
    path = draw(st.sampled_from(sorted(FIELDS)))
    body = json.loads(json.dumps({"model": MODEL} | COMMON | FIELDS[path]))
    for _ in range(draw(st.integers(1, 3))):
        place, key = body, draw(st.sampled_from(sorted(body)))
        # Go down into the body, so that the wrong value is seldom at the top.
        while isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
            place = place[key]
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
        place[key] = draw(NASTY)
    return path, body


@given(case=bodies())
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_no_body_is_answered_with_a_failure_of_ours(
    shared_platform: Platform, case: tuple[str, Any]
) -> None:
    path, body = case
    shared_platform.say("fine")
    response = await shared_platform.post(path, body)
    assert response.status_code in (200, 400, 404), (response.status_code, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")


async def test_after_all_of_them_the_answer_is_as_before(shared_platform: Platform) -> None:
    shared_platform.say("still here")
    answer = await shared_platform.chat(temperature=0)
    assert answer.json()["choices"][0]["message"]["content"] == "still here"
    assert (await shared_platform.settled()).held == 0
