"""The older completions route."""

import json

from tests.api.conftest import MODEL, Platform


async def complete(platform: Platform, prompt: object, **parameters: object):
    body = {"model": MODEL, "prompt": prompt} | parameters
    return await platform.post("/v1/completions", body)


async def test_a_whole_completion_has_the_older_shape(platform: Platform) -> None:
    platform.say(" to be or not to be")
    content = (await complete(platform, "The question is")).json()
    assert content["id"].startswith("cmpl")
    assert content["object"] == "text_completion"
    choice = content["choices"][0]
    assert choice == {
        "index": 0,
        "text": " to be or not to be",
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert content["usage"]["cost"]


async def test_the_output_stops_after_sixteen_tokens_by_default(platform: Platform) -> None:
    platform.say("a b c d e f g h i j k l m n o p q r s t u v w x y z")
    content = (await complete(platform, "x")).json()
    assert content["usage"]["completion_tokens"] == 16
    assert content["choices"][0]["finish_reason"] == "length"


async def test_ids_are_taken_as_they_are(platform: Platform) -> None:
    platform.say("fine")
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        content = (await complete(platform, prompt)).json()
        assert content["usage"]["prompt_tokens"] == 3
        assert platform.worker.requests[-1].prompt_token_ids == [5, 6, 7]
    text = (await complete(platform, ["A text"])).json()
    assert text["usage"]["prompt_tokens"] == len(platform.ids("A text"))


async def test_a_stream_has_usage_and_a_finish_reason(platform: Platform) -> None:
    platform.say(" leading space is kept")
    response = await complete(
        platform, "x", stream=True, stream_options={"include_usage": True}, max_tokens=50
    )
    events = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == " leading space is kept"
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(platform.ids(text)) + 1


async def test_logprobs_have_the_older_shape(platform: Platform) -> None:
    platform.say("Hello there")
    content = (await complete(platform, "x", logprobs=1)).json()
    logprobs = content["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Hello there"
    lengths = {len(logprobs[name]) for name in logprobs}
    assert lengths == {len(platform.ids("Hello there"))}
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])


async def test_what_is_not_built_is_refused_and_not_ignored(platform: Platform) -> None:
    for name, value in {"echo": True, "suffix": "x", "best_of": 2}.items():
        response = await complete(platform, "x", **{name: value})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_parameter"), name
        assert error["param"] == name
    several = await complete(platform, ["a", "b"])
    assert several.json()["error"]["code"] == "unsupported_parameter"
