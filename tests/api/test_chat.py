"""Chat completions over the real queue: shapes, text, and what they cost."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from billing.money import cost, format_usd, parse_usd
from tests.api.conftest import CONTEXT_LENGTH, MODEL, Platform, fast_tokenizer
from tests.api.fake_worker import Script

TEXT = "Prefill comes first, decodes ride along. 🚀 Naïve café."


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events; asserts that [DONE] is the last one."""
    blocks = [block for block in response.text.split("\n\n") if block]
    assert all(block.startswith(("data: ", ": ")) for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert "[DONE]" not in data[:-1]
    return [json.loads(event) for event in data[:-1]]


def joined(chunks: list[Any], choice: int = 0) -> str:
    return "".join(
        part["delta"].get("content") or ""
        for chunk in chunks
        for part in chunk["choices"]
        if part["index"] == choice
    )


async def test_a_whole_answer_has_openai_s_shape(platform: Platform) -> None:
    platform.say(TEXT)
    answer = await platform.chat(temperature=0)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["id"].startswith("chatcmpl")
    assert content["object"] == "chat.completion"
    assert content["model"] == MODEL
    assert content["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = content["usage"]
    num_output = len(platform.ids(TEXT)) + 1
    assert usage["completion_tokens"] == num_output, "the end-of-sequence token counts"
    assert usage["total_tokens"] == usage["prompt_tokens"] + num_output
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert content["timing"]["queued_ms"] == 1.0
    assert content["timing"]["queued_behind_own_ms"] == 0.3
    assert content["timing"]["queued_behind_others_ms"] == 0.5
    assert content["timing"]["tenants_active"] == 2
    assert content["timing"]["prefill_ms"] == 2.0
    assert content["timing"]["ttft_ms"] > 0
    assert content["timing"]["decode_tokens_per_s"] == pytest.approx((num_output - 1) / 0.03, 1e-3)
    assert answer.headers["x-request-id"].startswith("req_")


async def test_usage_equals_the_ledger_to_the_nano_dollar(
    platform_on_each_database: Platform,
) -> None:
    platform = platform_on_each_database
    platform.say(TEXT, num_cached_tokens=3)
    before = await platform.balance()
    content = (await platform.chat()).json()
    after = await platform.balance()
    usage = content["usage"]
    listing = await platform.services.catalogue.find(MODEL)
    due = cost(
        listing.price,
        uncached_input=usage["prompt_tokens"] - 3,
        cached_input=3,
        output=usage["completion_tokens"],
    )
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert parse_usd(usage["cost"]) == due == before.posted - after.posted
    assert usage["balance_remaining"] == format_usd(after.available)
    assert after.held == 0
    record = (
        await platform.client.get(
            f"/v1/generations/{content['id']}", headers=platform.customer.headers
        )
    ).json()
    assert record["cost"] == usage["cost"]
    assert record["outcome"] == "completed"
    assert record["completion_tokens"] == usage["completion_tokens"]


async def test_a_stream_says_the_same_as_a_whole_answer(platform: Platform) -> None:
    platform.say(TEXT)
    whole = (await platform.chat()).json()
    response = await platform.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    chunks = events(response)
    assert joined(chunks) == whole["choices"][0]["message"]["content"] == TEXT
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first = chunks[0]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["cost"] == whole["usage"]["cost"]
    assert last["usage"]["balance_remaining"] == format_usd((await platform.balance()).available)
    assert last["timing"]["ttft_ms"] > 0


async def test_usage_is_not_streamed_unless_asked_for(platform: Platform) -> None:
    platform.say("Hello")
    chunks = events(await platform.chat(stream=True))
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


async def test_several_choices_are_billed_with_one_prompt(platform: Platform) -> None:
    platform.say("One two three")
    before = await platform.balance()
    content = (await platform.chat(n=3, max_tokens=2)).json()
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in content["choices"]} == {"length"}
    assert content["usage"]["completion_tokens"] == 6
    alone = (await platform.chat(max_tokens=2)).json()
    assert content["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    charged = parse_usd(content["usage"]["cost"]) + parse_usd(alone["usage"]["cost"])
    assert before.posted - (await platform.settled()).posted == charged


async def test_streamed_choices_each_begin_and_end_once(platform: Platform) -> None:
    platform.say("One two three")
    chunks = events(await platform.chat(n=2, stream=True))
    for index in (0, 1):
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == ["stop"]
        assert joined(chunks, index) == "One two three"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_string_across_tokens_is_never_shown(
    platform: Platform, is_streamed: bool
) -> None:
    platform.say("alpha beta gamma delta", end="never")
    stop = "ta gam"
    response = await platform.chat(stop=[stop, ""], stream=is_streamed, max_tokens=50)
    if is_streamed:
        chunks = events(response)
        text, reason = joined(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == ("alpha be", "stop")
    async with asyncio.timeout(1):
        while platform.worker.num_running:
            await asyncio.sleep(0.005)


async def test_a_choice_that_a_stop_string_ended_is_computed_no_further(
    platform: Platform,
) -> None:
    text = "alpha beta gamma delta " + "and on " * 40
    platform.say(text, delay_s=0.005, choice_delay_s=0.3)
    content = (await platform.chat(n=2, stop=" gamma")).json()
    assert {choice["message"]["content"] for choice in content["choices"]} == {"alpha beta"}
    assert {choice["finish_reason"] for choice in content["choices"]} == {"stop"}
    accepted = len(platform.ids("alpha beta gamma"))
    assert content["usage"]["completion_tokens"] == 2 * accepted
    [ended] = platform.worker.ended_choices
    assert ended.choice == 0, "the last one ends with its request"
    async with asyncio.timeout(1):
        while platform.worker.num_running:
            await asyncio.sleep(0.005)
    assert platform.worker.num_emitted < len(platform.ids(text))
    assert platform.services.broker.num_streams == 0


async def test_tokens_after_the_stop_string_are_not_billed(platform: Platform) -> None:
    platform.say("alpha beta gamma delta epsilon", tokens_per_frame=100)
    content = (await platform.chat(stop=" gamma")).json()
    accepted = len(platform.ids("alpha beta gamma"))
    assert content["usage"]["completion_tokens"] == accepted


async def test_text_held_back_for_a_stop_string_is_flushed_at_the_end(platform: Platform) -> None:
    platform.say("the end is ne")
    content = (await platform.chat(stop="near")).json()
    assert content["choices"][0]["message"]["content"] == "the end is ne"


async def test_streams_hold_whole_characters_only(platform: Platform) -> None:
    platform.say("🚀🇨🇭é漢字")
    chunks = events(await platform.chat(stream=True))
    assert joined(chunks) == "🚀🇨🇭é漢字"
    assert not any("\ufffd" in joined([chunk]) for chunk in chunks)
    assert not any(
        part["delta"].get("content") == "" and "role" not in part["delta"]
        for chunk in chunks
        for part in chunk["choices"]
    )


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_length_means_exactly_max_tokens(platform: Platform, max_tokens: int) -> None:
    platform.say("one two three four five six seven eight nine")
    content = (await platform.chat(max_tokens=max_tokens)).json()
    assert content["choices"][0]["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == max_tokens


async def test_more_max_tokens_than_context_is_clamped(platform: Platform) -> None:
    platform.say("fine")
    content = (await platform.chat(max_tokens=100_000_000)).json()
    assert content["choices"][0]["finish_reason"] == "stop"
    limit = platform.worker.requests[-1].max_tokens
    assert limit == CONTEXT_LENGTH - content["usage"]["prompt_tokens"]


async def test_null_is_the_same_as_absent(platform: Platform) -> None:
    platform.say("fine")
    nulls = dict.fromkeys(
        ["stop", "seed", "temperature", "max_tokens", "n", "stream", "stream_options", "tools",
         "logit_bias", "top_p", "logprobs", "top_logprobs", "response_format", "user"]
    )  # fmt: skip
    response = await platform.chat(**nulls)
    assert response.status_code == 200, response.text


async def test_extra_fields_and_empty_tools_are_ignored(platform: Platform) -> None:
    platform.say("fine")
    response = await platform.chat(
        tools=[],
        tool_choice="auto",
        user="u",
        store=True,
        metadata={"a": 1},
        unheard_of=[{}],
        response_format={"type": "text"},
    )
    assert response.status_code == 200, response.text


async def test_parameters_reach_the_engine_as_they_were_sent(platform: Platform) -> None:
    platform.say("fine")
    await platform.chat(
        temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, frequency_penalty=0.5,
        presence_penalty=-0.5, repetition_penalty=1.1, logit_bias={"5": -100}, seed=-3,
        max_completion_tokens=9, max_tokens=5, stop_token_ids=[11],
    )  # fmt: skip
    request = platform.worker.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 0)
    assert (sampling.min_p, sampling.frequency_penalty) == (0.1, 0.5)
    assert (sampling.presence_penalty, sampling.repetition_penalty) == (-0.5, 1.1)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.seed == -3
    assert sampling.stop_token_ids == (2, 11)
    assert request.max_tokens == 9, "max_completion_tokens wins"
    assert request.tenant == platform.customer.organization_id


async def test_developer_and_parts_render_as_system_and_text(platform: Platform) -> None:
    platform.say("fine")
    body = {"model": MODEL, "max_tokens": 2}
    forms = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"}],
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        ],
    ]
    for messages in forms:
        answer = await platform.post("/v1/chat/completions", body | {"messages": messages})
        assert answer.status_code == 200, answer.text
    first, second = platform.worker.requests[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_control_tokens_in_a_message_stay_text(platform: Platform) -> None:
    platform.say("fine")
    await platform.chat("x")
    plain = platform.worker.requests[-1].prompt_token_ids
    await platform.chat("<|im_end|>" * 20)
    forged = platform.worker.requests[-1].prompt_token_ids
    assert forged.count(2) == plain.count(2)
    assert len(forged) - len(plain) >= 40


async def test_logprobs_cover_every_token_once(platform: Platform) -> None:
    platform.say("Rocket 🚀 away")
    whole = (await platform.chat(logprobs=True, top_logprobs=2)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == len(platform.ids("Rocket 🚀 away"))
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "Rocket 🚀 away"
    assert all(len(token["top_logprobs"]) == 2 for token in content)
    chunks = events(await platform.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [
        token
        for chunk in chunks
        for part in chunk["choices"]
        for token in (part["logprobs"] or {}).get("content", [])
    ]
    assert streamed == content


async def test_tokens_behind_a_special_one_have_their_logprobs_too(platform: Platform) -> None:
    """A special token has a name and no text; what is billed is shown to the last token."""
    special = fast_tokenizer(platform.directory).token_to_id("<|im_start|>")
    script = Script(token_ids=(*platform.ids("one"), special, *platform.ids(" two three")))
    platform.worker.script_of = lambda request: script
    answer = (await platform.chat(logprobs=True)).json()
    shown = answer["choices"][0]["logprobs"]["content"]
    assert len(shown) + 1 == answer["usage"]["completion_tokens"]  # the end has no text either
    assert shown[-1]["token"] == " three"


async def test_forty_eight_requests_at_once_are_all_served(platform: Platform) -> None:
    platform.say("yes")
    answers = await asyncio.gather(*(platform.chat(max_tokens=1) for _ in range(48)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 48
    charged = sum(parse_usd(answer.json()["usage"]["cost"]) for answer in answers)
    balance = await platform.settled()
    assert balance.posted == 100_000_000_000 - charged


async def test_an_answer_is_cut_where_the_credit_ends(platform: Platform) -> None:
    platform.say("one two three four five six seven eight nine ten")
    prompt_tokens = (await platform.chat(max_tokens=1)).json()["usage"]["prompt_tokens"]
    listing = await platform.services.catalogue.find(MODEL)
    enough = cost(listing.price, uncached_input=prompt_tokens, cached_input=0, output=4)
    await platform.set_balance(platform.customer, enough)
    content = (await platform.chat()).json()
    assert content["choices"][0]["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 4
    assert content["usage"]["balance_remaining"] == "0.000000000"
    refused = await platform.chat()
    assert refused.status_code == 402
    assert refused.headers["x-should-retry"] == "false"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_credit")
    assert error["available"] == "0.000000000"
    assert parse_usd(error["required"]) > 0


async def test_a_refused_request_never_reaches_a_worker(platform: Platform) -> None:
    platform.say("never")
    await platform.set_balance(platform.customer, 0)
    assert (await platform.chat()).status_code == 402
    await asyncio.sleep(0.1)
    assert platform.worker.requests == []


async def test_a_worker_error_costs_nothing(platform: Platform) -> None:
    before = await platform.balance()
    platform.say("half an ans", end="error")
    answer = await platform.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "generation_failed"
    assert await platform.settled() == before


async def test_an_error_inside_a_stream_is_an_event_and_costs_nothing(platform: Platform) -> None:
    before = await platform.balance()
    platform.say("half an ans", end="error")
    chunks = events(await platform.chat(stream=True))
    assert chunks[-1]["error"]["code"] == "generation_failed"
    assert chunks[-1]["error"]["message"]
    assert await platform.settled() == before


async def test_without_a_worker_the_answer_is_503_and_costs_nothing(platform: Platform) -> None:
    platform.worker.is_dead = True
    before = await platform.balance()
    await asyncio.sleep(1.1)
    for is_streamed in (False, True):
        answer = await platform.chat(stream=is_streamed)
        assert answer.status_code == 503, answer.text
        assert answer.headers["x-should-retry"] == "true"
        assert answer.json()["error"]["code"] == "model_unavailable"
    assert await platform.settled() == before


async def test_a_waiting_stream_is_told_its_position(platform: Platform) -> None:
    platform.say("at last")
    platform.worker.is_taking = False
    asking = asyncio.create_task(platform.chat(stream=True))
    await asyncio.sleep(1.5)
    platform.worker.is_taking = True
    response = await asking
    comments = [line for line in response.text.split("\n\n") if line.startswith(": queued")]
    assert comments
    assert comments[0].startswith(": queued position=0")
    assert joined(events(response)) == "at last"
    # The last comment comes in one chunk with the first event, so that a client that strips its
    # chunks of white space still finds where the comments end.
    blocks = response.text.split("\n\n")
    assert blocks[len(comments)] == ": started"
    assert blocks[len(comments) + 1].startswith("data: ")


async def test_a_model_that_is_not_in_memory_is_waited_for_and_one_that_failed_is_503(
    platform: Platform,
) -> None:
    platform.say("at last")
    platform.worker.state = "unloaded"
    await asyncio.sleep(0.5)
    asking = asyncio.create_task(platform.chat(stream=True))
    await asyncio.sleep(1.5)  # longer than a model without any worker is waited for
    platform.worker.state = "ready"
    response = await asking
    comments = [line for line in response.text.split("\n\n") if line.startswith(": queued")]
    assert comments[0] == ": queued position=0 model=loading"
    assert joined(events(response)) == "at last"

    platform.worker.state = "failed"
    await asyncio.sleep(0.5)
    before = await platform.settled()
    answer = await platform.chat()
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "model_unavailable"
    assert await platform.settled() == before


async def test_greedy_below_a_tiny_temperature(platform: Platform) -> None:
    platform.worker.script_of = lambda request: Script(platform.ids("x"))
    await platform.chat(temperature=1e-9)
    assert platform.worker.requests[-1].sampling.temperature == 0
    await platform.chat(top_p=0)
    assert platform.worker.requests[-1].sampling.top_k == 1
