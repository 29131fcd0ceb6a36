"""Frames that pass their request's task: the same answer, and every limit still holds."""

import json
from pathlib import Path

import httpx
import pytest

from api.express import Express
from engine.messages import TokenFrame
from tests.api.conftest import MODEL, Platform, Populated, open_platform, serving

STORY = "once upon a time there was a model " * 30
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What became of each frame that was offered."""
    answers: list[bool] = []
    take = Express.take

    def noted(self: Express, frame: TokenFrame) -> bool:
        answers.append(take(self, frame))
        return answers[-1]

    monkeypatch.setattr(Express, "take", noted)
    return answers


async def story(platform: Platform, url: str, **parameters: object) -> str:
    """The text of one streamed answer over a real connection."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        response = await client.post(
            "/v1/chat/completions", json=BODY | parameters, headers=platform.customer.headers
        )
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    return "".join(
        choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]
    )


async def test_ordinary_frames_pass_and_the_text_is_the_same(
    platform: Platform, base_url: str, taken: list[bool]
) -> None:
    platform.say(STORY, delay_s=0.002)
    assert await story(platform, base_url) == STORY
    assert taken.count(True) > len(platform.ids(STORY)) / 2
    assert not taken[-1]  # the end is the task's


async def test_text_that_may_end_before_its_worker_says_so_does_not_pass(
    platform: Platform, base_url: str, taken: list[bool]
) -> None:
    platform.say(STORY, delay_s=0.002)
    assert await story(platform, base_url, stop=["there"]) == "once upon a time "
    assert not any(taken)


async def test_slices_are_asked_for_while_frames_pass(
    platform: Platform, base_url: str, taken: list[bool]
) -> None:
    text = STORY * 3
    num_tokens = len(platform.ids(text))
    assert num_tokens > platform.services.billing_settings.slice_tokens
    platform.say(text)
    assert await story(platform, base_url, max_tokens=num_tokens) == text
    assert platform.worker.extensions
    assert any(taken)


async def test_a_stream_that_flows_is_never_silent(
    populated_sqlite: Populated, clean_redis: str, default_model_directory: Path
) -> None:
    """Its task hears nothing for longer than the limit, because the frames pass it."""
    limits = {"silence_timeout_s": 0.4, "queue_report_interval_s": 0.1}
    async with (
        open_platform(populated_sqlite, clean_redis, default_model_directory, **limits) as platform,
        serving(platform.app) as url,
    ):
        text = "once upon a time there was a model"
        platform.say(text, delay_s=0.25)
        assert await story(platform, url) == text


async def test_a_whole_answer_takes_them_too(platform: Platform, taken: list[bool]) -> None:
    platform.say(STORY, delay_s=0.002)
    answer = await platform.chat()
    assert answer.json()["choices"][0]["message"]["content"] == STORY
    assert any(taken)
