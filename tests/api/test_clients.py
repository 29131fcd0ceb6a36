"""The official OpenAI client, sync and async, with its own default retries."""

import asyncio

import openai
import pytest

from tests.api.conftest import MODEL, Platform

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(platform: Platform, base_url: str):
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=platform.customer.key) as made:
        yield made


async def test_the_async_client_reads_whole_answers_and_streams(
    platform: Platform, client: openai.AsyncOpenAI
) -> None:
    platform.say("Hello, Ada")
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello, Ada"
    assert answer.usage is not None
    assert answer.usage.cost.startswith("0.0000")
    assert answer._request_id is not None
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    async for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == "Hello, Ada"
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


async def test_the_helpers_of_the_client_work(
    platform: Platform, client: openai.AsyncOpenAI
) -> None:
    platform.say("Hello, Ada")
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, Ada"
    models = [model.id async for model in client.models.list()]
    assert models == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    completion = await client.completions.create(model=MODEL, prompt="x", max_tokens=50)
    assert completion.choices[0].text == "Hello, Ada"


async def test_the_sync_client_works(platform: Platform, base_url: str) -> None:
    platform.say("Hello, Ada")

    def ask() -> str:
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key=platform.customer.key) as client:
            stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == "Hello, Ada"


async def test_errors_have_the_client_s_own_classes_and_are_not_repeated(
    platform: Platform, client: openai.AsyncOpenAI
) -> None:
    platform.say("x")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="no/such", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert wrong.value.param == "temperature"
    stranger = client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError):
        await stranger.chat.completions.create(model=MODEL, messages=MESSAGES)
    await platform.set_balance(platform.customer, 0)
    with pytest.raises(openai.APIStatusError) as spent:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert spent.value.status_code == 402
    assert spent.value.code == "insufficient_credit"
    assert spent.value.type == "insufficient_quota"


async def test_an_error_inside_a_stream_raises_in_the_client(
    platform: Platform, client: openai.AsyncOpenAI
) -> None:
    platform.say("half", end="error")
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="model server failed"):
        async for _ in stream:
            pass
