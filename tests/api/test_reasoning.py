"""Reasoning is split from the answer, counted, and never in the way of a form."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.api.conftest import MODEL, Platform, open_platform, populate
from tests.api.test_chat import events
from tests.api.test_messages import named_events
from tests.api.test_responses import typed_events

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif -%}
{%- endif -%}"""
ANSWER = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.fixture(scope="session")
def thinking_directory(
    default_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The default model with a template that knows thoughts, and tokens that mark them."""
    directory = tmp_path_factory.mktemp("thinking")
    for path in default_model_directory.iterdir():
        if path.name not in ("tokenizer.json", "chat_template.jinja"):
            (directory / path.name).symlink_to(path)
    fast = tokenizers.Tokenizer.from_file(str(default_model_directory / "tokenizer.json"))
    fast.add_tokens(["<think>", "</think>"])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
async def thinker(
    sqlite_url: str, clean_redis: str, thinking_directory: Path
) -> AsyncIterator[Platform]:
    database = await populate(sqlite_url, thinking_directory)
    async with open_platform(database, clean_redis, thinking_directory) as opened:
        yield opened


async def test_reasoning_is_content_of_its_own_and_counted(thinker: Platform) -> None:
    thinker.say(ANSWER)
    content = (await thinker.chat()).json()
    message = content["choices"][0]["message"]
    assert message["content"] == "Four."
    assert message["reasoning_content"] == "Two and two."
    details = content["usage"]["completion_tokens_details"]
    thought = len(thinker.ids("<think>\nTwo and two.\n</think>"))
    assert details == {"reasoning_tokens": thought}
    chunks = events(await thinker.chat(stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Two and two."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Four."


async def test_a_thought_that_the_prompt_opened_needs_no_marker(thinker: Platform) -> None:
    thinker.say(ANSWER.removeprefix("<think>\n"))
    answer = await thinker.chat(reasoning_effort="high")
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    by_template = await thinker.chat(chat_template_kwargs={"enable_thinking": True})
    assert by_template.json()["choices"] == answer.json()["choices"]
    thinker.say("Four.")
    none = (await thinker.chat(reasoning_effort="none")).json()["choices"][0]["message"]
    assert none["content"] == "Four."
    assert "reasoning_content" not in none


async def test_thinking_blocks_come_first_in_anthropic_s_form(thinker: Platform) -> None:
    thinker.say(ANSWER.removeprefix("<think>\n"))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    answer = (await thinker.post("/v1/messages", body)).json()
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Two and two.", "signature": ""},
        {"type": "text", "text": "Four."},
    ]
    found = named_events(await thinker.post("/v1/messages", body | {"stream": True}))
    starts = [data["content_block"]["type"] for n, data in found if n == "content_block_start"]
    assert starts == ["thinking", "text"]
    kinds = {data["delta"]["type"] for n, data in found if n == "content_block_delta"}
    assert kinds == {"thinking_delta", "signature_delta", "text_delta"}
    history = body["messages"] + [{"role": "assistant", "content": answer["content"]}]
    again = body | {"messages": [*history, {"role": "user", "content": "And?"}]}
    assert (await thinker.post("/v1/messages", again)).status_code == 200


async def test_reasoning_is_an_item_of_a_response(thinker: Platform) -> None:
    thinker.say(ANSWER)
    body = {"model": MODEL, "input": "Hi"}
    answer = (await thinker.post("/v1/responses", body)).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    found = typed_events(await thinker.post("/v1/responses", body | {"stream": True}))
    thought = "".join(e["delta"] for e in found if e["type"] == "response.reasoning_text.delta")
    assert thought == "Two and two."


async def test_a_form_begins_behind_the_thought(thinker: Platform) -> None:
    thinker.say('I know.</think>{"a": 1}')
    form = {"type": "json_object"}
    answer = await thinker.chat(response_format=form, reasoning_effort="low")
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I know.", '{"a": 1}')
    structure = thinker.worker.requests[-1].structure
    assert structure is not None
    assert structure.begins_after == thinker.ids("</think>")[0]
    thinker.say('{"a": 1}')
    await thinker.chat(response_format=form)
    plain = thinker.worker.requests[-1].structure
    assert plain is not None
    assert plain.begins_after is None
