"""The older completions route."""

import json

from api.choices import Piece, ShownToken
from api.formats.completions import best_of
from api.outputs.deltas import TextDelta, text_of
from billing.money import parse_usd
from engine.messages import GenerateRequest
from tests.api.conftest import MODEL, Platform
from tests.api.fake_worker import Script


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


async def test_several_prompts_are_answered_in_their_order(platform: Platform) -> None:
    before = await platform.balance()
    prompts = ["prompt a", "prompt b b"]
    texts = {platform.ids(prompts[0]): " answer a", platform.ids(prompts[1]): " answer b b"}

    def script_of(request: GenerateRequest) -> Script:
        return Script(platform.ids(texts[tuple(request.prompt_token_ids)]))

    platform.worker.script_of = script_of
    content = (await complete(platform, prompts, n=2, max_tokens=50)).json()
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in content["choices"]] == [
        *[" answer a"] * 2,
        *[" answer b b"] * 2,
    ]
    usage = content["usage"]
    assert usage["prompt_tokens"] == sum(len(platform.ids(prompt)) for prompt in prompts)
    assert parse_usd(usage["cost"]) == before.posted - (await platform.settled()).posted
    streamed = await complete(platform, prompts, stream=True, max_tokens=50)
    blocks = [block.removeprefix("data: ") for block in streamed.text.split("\n\n") if block]
    assert blocks.count("[DONE]") == 1
    assert blocks[-1] == "[DONE]"
    chunks = [json.loads(block) for block in blocks[:-1]]
    for index, text in enumerate([" answer a", " answer b b"]):
        mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in mine) == text
        assert [part["finish_reason"] for part in mine].count("stop") == 1


async def test_one_prompt_that_fails_fails_the_request_and_costs_nothing(
    platform: Platform,
) -> None:
    before = await platform.balance()

    def script_of(request: GenerateRequest) -> Script:
        is_bad = len(request.prompt_token_ids) > 3
        return Script((), end="error") if is_bad else Script(platform.ids("x " * 900), delay_s=0.01)

    platform.worker.script_of = script_of
    response = await complete(platform, ["x", "x y z a b c d e f"], max_tokens=900)
    assert response.status_code == 503
    assert await platform.settled() == before, "the other one stopped and was voided, too"


async def test_echo_begins_each_choice_with_its_prompt(platform: Platform) -> None:
    platform.say(" be or not")
    content = (await complete(platform, ["To", "Not to"], echo=True, n=2)).json()
    texts = [choice["text"] for choice in content["choices"]]
    assert texts == ["To be or not"] * 2 + ["Not to be or not"] * 2
    token_ids = list(platform.ids("To"))
    from_ids = (await complete(platform, token_ids, echo=True)).json()
    assert from_ids["choices"][0]["text"] == "To be or not"
    streamed = await complete(platform, "To", echo=True, stream=True)
    blocks = [block.removeprefix("data: ") for block in streamed.text.split("\n\n") if block]
    chunks = [json.loads(block) for block in blocks[:-1]]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "To be or not"


async def test_the_best_of_several_is_returned_and_all_are_paid(platform: Platform) -> None:
    platform.say("Hello there")
    content = (await complete(platform, "x", best_of=4, n=2)).json()
    assert [choice["index"] for choice in content["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in content["choices"])
    each = len(platform.ids("Hello there")) + 1
    assert content["usage"]["completion_tokens"] == 4 * each


def test_the_most_likely_choices_win() -> None:
    def piece(choice: int, *logprobs: float) -> Piece:
        tokens = tuple(ShownToken(b"x", logprob, (), 0) for logprob in logprobs)
        return Piece(choice, (TextDelta(str(choice)),), tokens, "stop")

    pieces = [piece(0, -3), piece(1, -1, -2), piece(2), piece(3, -1), piece(4, -9), piece(5, -8)]
    best = best_of(pieces, 1, 3)
    assert [(winner.choice, text_of(winner.deltas)) for winner in best] == [(0, "1"), (1, "3")]


async def test_what_cannot_be_honoured_is_400_and_not_ignored(platform: Platform) -> None:
    for param, wrong in {
        "suffix": {"suffix": "x"},  # this model was not trained to fill in the middle
        "best_of": {"best_of": 1, "n": 2},
        "max_tokens": {"max_tokens": 0},
        "prompt_logprobs": {"prompt_logprobs": 1, "stream": True},
    }.items():
        response = await complete(platform, "x", **wrong)
        assert response.status_code == 400, param
        assert response.json()["error"]["param"] == param
    streamed = await complete(platform, "x", best_of=2, stream=True)
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "best_of")
    many = await complete(platform, ["x"] * 257)
    assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")
