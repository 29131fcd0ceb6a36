"""The promises of README and of issue 2, against real processes. In the order of the file."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import ROOT, RunningPlatform, wait_until
from tests.engine.tiny import save_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def client_of(platform: RunningPlatform) -> openai.OpenAI:
    return openai.OpenAI(base_url=platform.ready["base_url"], api_key=platform.ready["api_key"])


def test_the_supervisor_answered_a_real_request_before_it_said_ready(
    platform: RunningPlatform,
) -> None:
    output = (platform.var / "output.txt").read_text()
    assert re.search(r"first token after \d+ ms · \d+ tokens · cost \$0\.0000\d+", output)
    assert f"{platform.origin}/signup" in output
    assert platform.ready["api_key"] in output
    assert platform.ready["admin_api_key"] not in output
    assert (platform.var / "ready.json").stat().st_mode & 0o777 == 0o600


def test_the_quickstart_of_the_readme_works_as_printed(
    platform: RunningPlatform, tmp_path: Path
) -> None:
    blocks = re.findall(r"```(bash|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    bash = "\n".join(text for kind, text in blocks if kind == "bash")
    programs = [text for kind, text in blocks if kind == "python"]
    assert len(programs) == 2, "OpenAI's client and Anthropic's"
    script = ["set -e", bash]
    for index, program in enumerate(programs):
        (tmp_path / f"{index}.py").write_text(
            program.replace("127.0.0.1:8000", platform.origin[7:])
        )
        script.append(f"{sys.executable} {index}.py > {index}.txt")
    ran = subprocess.run(
        ["bash", "-c", "\n".join(script).replace("http://127.0.0.1:8000", platform.origin)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    account = json.loads((tmp_path / "account.json").read_text())
    assert account["credit"] == "100.000000000"
    assert "data: [DONE]" in ran.stdout
    assert '"object":"chat.completion"' in ran.stdout.replace(": ", ":")
    assert '"balance"' in ran.stdout
    for index in range(len(programs)):
        assert (tmp_path / f"{index}.txt").read_text().strip(), programs[index]


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Basel", "Zürich"]},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def test_a_form_and_a_forced_call_hold_with_the_real_model(platform: RunningPlatform) -> None:
    client = client_of(platform)
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Which city is the capital of Switzerland?"}],
        "max_tokens": 60,
        "temperature": 1.0,
    }
    schema = {"name": "answer", "schema": CITY, "strict": True}
    formed = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": schema}
    )
    assert formed.choices[0].finish_reason == "stop"
    found = json.loads(formed.choices[0].message.content or "")
    assert found["city"] in CITY["properties"]["city"]["enum"]
    function = {"name": "answer", "description": "Answer the question", "parameters": CITY}
    tools = [{"type": "function", "function": function}]
    called = client.chat.completions.create(
        **asked, tools=tools, tool_choice={"type": "function", "function": {"name": "answer"}}
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert set(json.loads(call.function.arguments)) == {"city", "is_capital"}
    with pytest.raises(openai.BadRequestError, match="required form"):
        client.chat.completions.create(
            **asked, response_format={"type": "regex", "pattern": "[.*"}, stream=True
        )


def test_a_stream_tells_its_cost_to_the_nano_dollar(platform: RunningPlatform) -> None:
    client = client_of(platform)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count to five."}],
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = stream
    usage: Any = last.usage
    prompt, cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
    exact = 20_000_000 * (prompt - cached) + 5_000_000 * cached
    exact += 60_000_000 * usage.completion_tokens
    assert usage.cost == f"0.{-(-exact // 1_000_000):09d}"
    credit = httpx.get(
        f"{platform.ready['base_url']}/credits",
        headers={"Authorization": f"Bearer {platform.ready['api_key']}"},
    ).json()
    assert credit["available"] == usage.balance_remaining


@pytest.mark.parametrize(
    ("key", "body", "status", "code"),
    [
        ("wrong", {"model": MODEL, "messages": []}, 401, "invalid_api_key"),
        (
            None,
            {"model": "no/such", "messages": [{"role": "user", "content": "x"}]},
            404,
            "model_not_found",
        ),
        (None, {"model": MODEL, "messages": "x"}, 400, None),
    ],
)
def test_errors_have_the_form_of_openai(
    platform: RunningPlatform, key: str | None, body: dict[str, Any], status: int, code: str | None
) -> None:
    response = httpx.post(
        f"{platform.ready['base_url']}/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {key or platform.ready['api_key']}"},
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code


@pytest.mark.browser
def test_a_newcomer_signs_up_in_the_browser_and_uses_the_key(
    platform: RunningPlatform, browser: Any
) -> None:
    page = browser.new_page()
    page.set_default_timeout(15_000)
    page.goto(f"{platform.origin}/signup")
    page.get_by_label("E-mail").fill("grace@example.com")
    page.get_by_label("Password").fill("a compiler in 1952")
    page.get_by_role("button", name="Create account").click()
    page.wait_for_url("**/welcome")
    key = page.locator("#api-key").inner_text()
    client = openai.OpenAI(base_url=platform.ready["base_url"], api_key=key)
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
    )
    assert answer.usage is not None
    spent: Any = answer.usage
    page.goto(f"{platform.origin}/usage")
    assert MODEL in page.content()
    assert float(spent.balance_remaining) < 100
    page.close()


@pytest.mark.browser
def test_the_playground_streams_an_answer_with_its_cost(
    platform: RunningPlatform, browser: Any
) -> None:
    page = browser.new_page()
    page.set_default_timeout(15_000)
    faults: list[Any] = []
    page.on("pageerror", lambda fault: faults.append(fault))  # noqa: PLW0108 - it marks functions
    page.goto(f"{platform.origin}/playground?model={MODEL}")
    turns = page.locator(".turn:not(.own)")

    def ask(question: str, key: str) -> None:
        page.get_by_label("API key").fill(key)
        page.get_by_label("Your message").fill(question)
        page.get_by_label("Your message").press("Control+Enter")
        page.get_by_role("button", name="Stop").wait_for(state="hidden")

    page.get_by_label("Max tokens").fill("12")
    ask("What is the capital of France?", "sk_ncompass_wrong")
    assert "API key" in turns.nth(0).get_by_role("alert").inner_text()
    assert page.get_by_label("Your message").input_value() == "What is the capital of France?"

    page.get_by_role("button", name="Start over").click()
    ask("What is the capital of France?", platform.ready["api_key"])
    facts = turns.nth(0).locator(".turn-facts").inner_text()
    assert re.search(
        r"first token \d+ ms · [\d.]+ tokens/s · \d+ \+ \d+ tokens · \$0\.\d{9} ", facts
    )
    first = int(re.search(r"(\d+) \+", facts).group(1))
    assert turns.nth(0).locator(".turn-said").inner_text()
    ask("And of Italy?", platform.ready["api_key"])
    second = int(re.search(r"(\d+) \+", turns.nth(1).locator(".turn-facts").inner_text()).group(1))
    assert second > first + 12  # the first question and its answer went with the second
    assert faults == []
    page.close()


def test_sixty_four_streams_at_once_are_all_answered_alike(platform: RunningPlatform) -> None:
    client = client_of(platform)

    def ask(_: int) -> str:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=24,
            temperature=0,
            stream=True,
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert len(set(answers)) == 1
    assert "Paris" in answers[0]


def test_hanging_up_stops_the_engine_within_a_second(platform: RunningPlatform) -> None:
    wait_until(lambda: platform.running_sequences() == 0, 10, "the engine is idle")
    headers = {"Authorization": f"Bearer {platform.ready['api_key']}"}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    url = f"{platform.ready['base_url']}/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        lines = response.iter_lines()  # kept: httpx hangs up when it is collected
        while '"content"' not in next(lines):
            pass
        wait_until(lambda: platform.running_sequences() == 1, 5, "the stream runs")
    started = time.monotonic()
    wait_until(lambda: platform.running_sequences() == 0, 5, "the worker stopped")
    assert time.monotonic() - started < 2.0  # a second, and half of one until the next heartbeat


def test_hanging_up_behind_two_requests_at_once_stops_nobody_else(
    platform: RunningPlatform,
) -> None:
    """On uvloop, whose transports raise where asyncio's drop what is written too late."""
    body = json.dumps(
        {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "A long story"}]}
    )
    request = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {platform.ready['api_key']}\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", platform.port), timeout=60) as connection:
            connection.sendall(2 * request)
            while b"data: " not in connection.recv(4_096):
                continue
    wait_until(lambda: platform.running_sequences() == 0, 5, "the engine is idle")
    answer = client_of(platform).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=2, timeout=60
    )
    assert answer.usage is not None


def test_the_command_line_adjusts_credit_and_proves_the_books(platform: RunningPlatform) -> None:
    before = platform.ncompass("credits", "show", "--organization", "demo@example.com").stdout
    adjusted = platform.ncompass(
        *("credits", "adjust", "--organization", "demo@example.com"),
        *("--amount", "-12.5", "--reason", "a test"),
    )
    assert adjusted.returncode == 0, adjusted.stderr
    posted = [float(re.search(r"balance\s+\$(\S+)", text)[1]) for text in (before, adjusted.stdout)]
    assert round(posted[0] - posted[1], 9) == 12.5
    proof = platform.ncompass("reconcile")
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "DIFF" not in proof.stdout
    integrity = platform.ncompass("check-integrity")
    assert integrity.returncode == 0, integrity.stdout + integrity.stderr


def test_a_model_is_added_while_the_platform_runs_and_a_bad_one_leaves_nothing(
    platform: RunningPlatform, tmp_path: Path
) -> None:
    prices = ["--input-price", "0.1", "--cached-price", "0.02", "--output-price", "0.4"]
    for name in ("tiny", "bad"):
        (tmp_path / name).mkdir()
        save_tiny("LlamaConfig", tmp_path / name)
    config = tmp_path / "bad" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 4}))

    refused = platform.ncompass("models", "add", str(tmp_path / "tiny"), *prices)
    assert refused.returncode == 1
    assert "ncompass: checking: the checkpoint names no licence" in refused.stderr
    licensed = [*prices, "--licence", "mit"]
    refused = platform.ncompass("models", "add", str(tmp_path / "bad"), *licensed)
    assert refused.returncode == 1
    assert "ncompass: loading: the checkpoint lacks the tensor" in refused.stderr

    added = platform.ncompass("models", "add", str(tmp_path / "tiny"), *licensed)
    assert added.returncode == 0, added.stderr
    assert "requests of 1,024 tokens at once" in added.stdout
    assert "tiny takes requests now" in added.stdout
    time.sleep(1.1)  # the API's catalogue is at most so old
    answer = client_of(platform).completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert {model.id for model in client_of(platform).models.list()} == {MODEL, "tiny"}
    shown = platform.ncompass("models", "show", "tiny").stdout
    assert "worker  ready: fused" in shown
    assert platform.ncompass("models", "remove", "tiny").returncode == 0


def test_holds_of_a_killed_api_process_are_closed_and_it_comes_back(
    platform: RunningPlatform,
) -> None:
    headers = {"Authorization": f"Bearer {platform.ready['api_key']}"}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    api = platform.ready["pids"]["api"]
    url = f"{platform.ready['base_url']}/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        while '"content"' not in next(lines):
            pass
        os.kill(api, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    wait_until(lambda: platform.ready["pids"].get("api") not in (api, None), 30, "it is back")

    def held() -> str:
        try:
            answer = httpx.get(f"{platform.ready['base_url']}/credits", headers=headers)
        except httpx.HTTPError:
            return "unknown"
        return str(answer.json().get("held"))

    wait_until(lambda: held() == "0.000000000", 60, "the sweeper closed the hold")
    wait_until(lambda: platform.running_sequences() == 0, 20, "the worker stopped it")
    assert platform.ncompass("reconcile").returncode == 0


def test_a_second_instance_on_the_same_state_is_refused_in_one_line(
    platform: RunningPlatform,
) -> None:
    refused = platform.ncompass("up")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "is using" in refused.stderr


def test_no_secret_is_in_any_log(platform: RunningPlatform) -> None:
    secrets = json.loads((platform.var / "secrets.json").read_text())
    canaries = [*secrets.values(), "Tell me a very long story", "correct horse battery staple"]
    for log in (platform.var / "logs").glob("*.log"):
        text = log.read_text(errors="replace")
        for canary in canaries:
            assert canary not in text, f"{log.name} holds a secret or a prompt"


def test_zz_sigterm_leaves_no_process_behind(platform: RunningPlatform) -> None:
    pids = list(platform.ready["pids"].values())
    family = psutil.Process(platform.process.pid).children(recursive=True)
    platform.process.send_signal(signal.SIGTERM)
    assert platform.process.wait(timeout=90) == 0
    assert not (platform.var / "ready.json").exists()
    wait_until(
        lambda: (
            not any(psutil.pid_exists(pid) for pid in pids)
            and not any(child.is_running() for child in family)
        ),
        10,
        "every process has ended",
    )
