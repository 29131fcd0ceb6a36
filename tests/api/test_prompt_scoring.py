"""How likely a prompt was, as vLLM and OpenAI's older route tell it."""

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from api.choices import Piece
from api.prompt_scoring import PromptScoring, ScoringWish
from billing.money import cost, parse_usd
from engine.broker.stream import RequestStream
from engine.messages import PromptLogprobs
from engine.tokenization import Tokenizer
from tests.api.conftest import BROKER, MODEL, Platform
from tests.api.fake_worker import FakeWorker
from tests.api.test_failover import say

PROMPT = "Naïve 🚀 café, to be or not"


async def complete(platform: Platform, prompt: object = PROMPT, **parameters: object):
    body = {"model": MODEL, "prompt": prompt} | parameters
    return await platform.post("/v1/completions", body)


def assert_scored(platform: Platform, logprobs: dict[str, Any], text: str, num_top: int) -> None:
    """The lists cover `text`, which begins with PROMPT, token by token."""
    lengths = {name: len(logprobs[name]) for name in logprobs}
    num_tokens = len(logprobs["tokens"])
    num_prompt = len(platform.ids(PROMPT))
    assert lengths == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), num_tokens
    )
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["token_logprobs"][1:num_prompt]) == {-0.25}
    assert set(logprobs["token_logprobs"][num_prompt:]) <= {-0.5}
    assert all(len(top) == num_top for top in logprobs["top_logprobs"][1:num_prompt])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text.startswith(token, offset), (token, offset)
    assert any(token.startswith("bytes:") for token in logprobs["tokens"]), "the rocket is in parts"
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("parts", [(), (1, 2, 3)])
async def test_an_echo_has_the_logprobs_of_the_prompt(
    platform: Platform, parts: tuple[int, ...]
) -> None:
    platform.say(" to be é 🚀 so", prompt_parts=parts)
    [choice] = (await complete(platform, echo=True, logprobs=2)).json()["choices"]
    assert choice["text"] == PROMPT + " to be é 🚀 so"
    assert_scored(platform, choice["logprobs"], choice["text"], 2)
    assert len(choice["logprobs"]["tokens"]) == len(platform.ids(PROMPT)) + len(
        platform.ids(" to be é 🚀 so")
    )
    assert "prompt_logprobs" not in choice
    assert platform.worker.requests[-1].sampling.num_prompt_logprobs == 2


async def test_streamed_and_repeated_echoes_say_the_same(platform: Platform) -> None:
    platform.say(" to be", prompt_parts=(2,))
    prompts = [PROMPT, list(platform.ids(PROMPT))]
    whole = (await complete(platform, [PROMPT, PROMPT], echo=True, logprobs=1, n=2)).json()
    from_ids = (await complete(platform, prompts[1], echo=True, logprobs=1)).json()
    assert len(whole["choices"]) == 4
    for choice in [*whole["choices"], *from_ids["choices"]]:
        assert choice["logprobs"] == whole["choices"][0]["logprobs"]
    streamed = await complete(platform, echo=True, logprobs=1, stream=True)
    blocks = [block.removeprefix("data: ") for block in streamed.text.split("\n\n") if block]
    parts = [json.loads(block)["choices"][0] for block in blocks[:-1]]
    assert "".join(part["text"] for part in parts) == PROMPT + " to be"
    for name, expected in whole["choices"][0]["logprobs"].items():
        told = [part["logprobs"][name] for part in parts if part["logprobs"]]
        assert [entry for some in told for entry in some] == expected


async def test_a_prompt_is_scored_without_a_token(platform: Platform) -> None:
    before = await platform.balance()
    platform.say("never shown")
    answer = (await complete(platform, echo=True, logprobs=0, max_tokens=0)).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert_scored(platform, choice["logprobs"], PROMPT, 0)
    assert len(choice["logprobs"]["tokens"]) == len(platform.ids(PROMPT))
    assert answer["usage"]["completion_tokens"] == 0
    price = (await platform.services.catalogue.find(MODEL)).price
    due = cost(price, uncached_input=len(platform.ids(PROMPT)), cached_input=0, output=0)
    after = await platform.settled()
    assert before.posted - after.posted == parse_usd(answer["usage"]["cost"]) == due
    body = {"model": MODEL, "prompt": PROMPT, "echo": True, "max_tokens": 0}
    quote = (await platform.post("/v1/quote", body)).json()
    assert quote["max_completion_tokens"] == 0
    assert parse_usd(quote["max_cost"]) == due
    plain = (await complete(platform, echo=True, max_tokens=0, n=2)).json()
    assert [choice["text"] for choice in plain["choices"]] == [PROMPT, PROMPT]
    assert all(choice["logprobs"] is None for choice in plain["choices"])


async def test_prompt_logprobs_have_vllm_s_form(platform: Platform) -> None:
    platform.say("Hello", prompt_parts=(2, 2))
    answer = (await complete(platform, prompt_logprobs=2, n=2)).json()
    ids = platform.ids(PROMPT)
    for choice in answer["choices"]:
        listed = choice["prompt_logprobs"]
        assert listed[0] is None
        assert len(listed) == len(ids)
        for token_id, entry in zip(ids[1:], listed[1:], strict=True):
            assert next(iter(entry)) == str(token_id), "the prompt's own token comes first"
            assert entry[str(token_id)]["rank"] == 2
            assert len(entry) == 3
            assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in entry.values())
    assert answer["choices"][0]["logprobs"] is None
    chat = (await platform.chat("Hi", prompt_logprobs=0)).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in (await platform.chat("Hi")).json()


async def test_both_forms_have_as_many_as_each_was_asked_for(platform: Platform) -> None:
    platform.say("Hello")
    [choice] = (await complete(platform, echo=True, logprobs=1, prompt_logprobs=4)).json()[
        "choices"
    ]
    assert_scored(platform, choice["logprobs"], choice["text"], 1)
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {5}
    [short] = (await complete(platform, [5], prompt_logprobs=1, max_tokens=1)).json()["choices"]
    assert short["prompt_logprobs"] == [None]


async def test_openai_s_client_reads_an_echo_with_logprobs(
    platform: Platform, base_url: str
) -> None:
    platform.say(" to be")
    key = platform.customer.key
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key) as client:
        asked = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 1}
        whole = await client.completions.create(**asked)
        assert whole.choices[0].logprobs is not None
        scored = whole.choices[0].logprobs.model_dump(exclude_unset=True)
        assert_scored(platform, scored, whole.choices[0].text, 1)
        tokens: list[str] = []
        async for chunk in await client.completions.create(**asked, stream=True):
            tokens += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.tokens) or []
        assert tokens == scored["tokens"]
        extra = {"prompt_logprobs": 1}
        listed = await client.completions.create(model=MODEL, prompt=PROMPT, extra_body=extra)
        assert len(listed.choices[0].prompt_logprobs) == len(platform.ids(PROMPT))


@pytest.fixture
def second_worker(platform: Platform, clean_redis: str) -> Iterator[FakeWorker]:
    """Another worker of the same model, which takes nothing yet."""
    worker = FakeWorker(clean_redis, MODEL, BROKER, name="second-worker", is_taking=False)
    yield worker.start()
    worker.stop()


async def test_scores_survive_their_worker_and_are_told_once(
    platform: Platform, second_worker: FakeWorker
) -> None:
    say(platform, second_worker, delay_s=0.02, prompt_parts=(1,) * 40)
    asked = complete(platform, echo=True, logprobs=1, max_tokens=30)
    answering = asyncio.create_task(asked)
    [stream] = await streams_of(platform)
    async with asyncio.timeout(5):
        while stream.first_prompt_logprob < 3:
            await asyncio.sleep(0.002)
    platform.worker.is_dead = True
    second_worker.is_taking = True
    answer = (await answering).json()
    assert_scored(platform, answer["choices"][0]["logprobs"], answer["choices"][0]["text"], 1)
    [resumed] = second_worker.requests
    assert resumed.attempt == 2
    assert 1 < resumed.first_prompt_logprob <= len(platform.ids(PROMPT))


async def streams_of(platform: Platform) -> list[RequestStream]:
    """The open ones, once there are any."""
    link = platform.services.broker._link(MODEL)
    async with asyncio.timeout(5):
        while not link.streams:
            await asyncio.sleep(0.002)
    return list(link.streams.values())


def test_pieces_wait_until_the_whole_prompt_is_scored(platform: Platform) -> None:
    tokenizer = Tokenizer.load(platform.directory)
    scoring = PromptScoring(tokenizer, [5, 6, 7], ScoringWish(num_listed=0))
    first, second = Piece(1), Piece(0)
    assert scoring.ready(first) == []
    for position in (1, 2):
        values = struct.pack("<f", -1.5), struct.pack("<i", 3)
        scoring.add(PromptLogprobs(position, 1, *values))
    shown = scoring.ready(second)
    assert [piece.choice for piece in shown] == [1, 0]
    for piece in shown:
        assert piece.prompt is not None
        assert piece.prompt.listed is not None
        listed = msgspec.json.decode(piece.prompt.listed)
        assert [entry and list(entry) for entry in listed] == [None, ["6"], ["7"]]
    [later] = scoring.ready(Piece(0))
    assert later.prompt is None
