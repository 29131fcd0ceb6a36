"""Clients that bring many packages, each run as its users do, against the API over real sockets.

`make test-clients` installs them into environments of their own below `var/clients`.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.messages import GenerateRequest
from engine.tokenization import Tokenizer
from tests.api.conftest import MODEL, Platform
from tests.api.fake_worker import Script
from tests.api.test_tools import NATIVE

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
ENVIRONMENTS = Path(__file__).parents[3] / "var" / "clients"
PYTHON_PACKAGES = [
    "langchain-openai==1.7.4",
    "litellm==1.110.2",
    "llama-index-llms-openai-like==0.8.1",
]
NODE_PACKAGES = [
    "openai@6.49.0",
    "@anthropic-ai/sdk@1.14.0",
    "ai@6.0.326",
    "@ai-sdk/openai-compatible@2.0.92",
]
TEXT = "Hello, Ada"
CITIES = ["Bern", "Basel"]


async def run(*command: str, cwd: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, (output + errors).decode()[-30_000:]
    return output.decode()


@pytest.fixture
async def python_environment() -> Path:
    """A virtual environment with the Python clients."""
    directory = ENVIRONMENTS / "python"
    stamp = directory / "packages.json"
    wanted = json.dumps(PYTHON_PACKAGES)
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        await run(sys.executable, "-m", "venv", str(directory), cwd=HERE)
        pip = str(directory / "bin" / "pip")
        await run(pip, "install", "-q", *PYTHON_PACKAGES, cwd=directory)
        stamp.write_text(wanted)
    return directory


@pytest.fixture
async def node_environment() -> Path:
    """A directory with the npm packages; the scripts are copied into it, as node wants it."""
    npm = shutil.which("npm")
    assert npm is not None, "`make test-clients` needs node and npm"
    directory = ENVIRONMENTS / "node"
    stamp = directory / "packages.json"
    wanted = json.dumps(NODE_PACKAGES)
    if not stamp.is_file() or stamp.read_text() != wanted:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "package.json").write_text('{"private": true, "type": "module"}')
        await run(npm, "install", "--no-audit", "--no-fund", *NODE_PACKAGES, cwd=directory)
        stamp.write_text(wanted)
    for script in HERE.glob("*.mjs"):
        shutil.copyfile(script, directory / script.name)
    return directory


@pytest.fixture
def scripted(platform: Platform) -> Platform:
    """A model that calls tools when it is told of any, and keeps to a form when it must."""
    tokenizer = Tokenizer.load(platform.directory)

    def script_of(request: GenerateRequest) -> Script:
        if request.structure is not None:
            source = json.loads(request.structure.source)
            call = {"name": "Weather", "arguments": {"city": "Bern"}}
            return Script(
                platform.ids(json.dumps([call] if "items" in source else {"city": "Bern"}))
            )
        has_tools = "<tools>" in tokenizer.decode(request.prompt_token_ids)
        return Script(platform.ids(NATIVE if has_tools else TEXT))

    platform.worker.script_of = script_of
    return platform


async def asked(interpreter: str, script: str, platform: Platform, url: str, cwd: Path) -> Any:
    output = await run(interpreter, script, url, platform.customer.key, MODEL, cwd=cwd)
    return json.loads(output.splitlines()[-1])


async def test_the_openai_package_of_npm(
    scripted: Platform, base_url: str, node_environment: Path
) -> None:
    told = await asked("node", "openai_client.mjs", scripted, base_url, node_environment)
    assert told == {
        "whole": TEXT,
        "streamed": TEXT,
        "calls": CITIES,
        "responded": TEXT,
        "error": {"name": "NotFoundError", "code": "model_not_found"},
    }


async def test_the_anthropic_package_of_npm(
    scripted: Platform, base_url: str, node_environment: Path
) -> None:
    told = await asked("node", "anthropic_client.mjs", scripted, base_url, node_environment)
    assert told == {
        "whole": TEXT,
        "streamed": TEXT,
        "calls": CITIES,
        "is_counted": True,
        "error": {"name": "NotFoundError", "status": 404},
    }


async def test_vercel_s_ai_sdk(scripted: Platform, base_url: str, node_environment: Path) -> None:
    told = await asked("node", "ai_client.mjs", scripted, base_url, node_environment)
    assert told == {"whole": TEXT, "streamed": TEXT, "calls": CITIES, "error": {"status": 400}}


async def test_langchain(scripted: Platform, base_url: str, python_environment: Path) -> None:
    python, script = str(python_environment / "bin" / "python"), str(HERE / "langchain_client.py")
    told = await asked(python, script, scripted, base_url, python_environment)
    assert told == {
        "whole": TEXT,
        "streamed": TEXT,
        "calls": CITIES,
        "formed": "Bern",
        "forced": "Bern",
    }


async def test_litellm(scripted: Platform, base_url: str, python_environment: Path) -> None:
    python, script = str(python_environment / "bin" / "python"), str(HERE / "litellm_client.py")
    told = await asked(python, script, scripted, base_url, python_environment)
    assert told == {
        "whole": TEXT,
        "streamed": TEXT,
        "anthropic": TEXT,
        "calls": CITIES,
        "anthropic_calls": CITIES,
        "error": "ContextWindowExceededError",
    }


async def test_llama_index(scripted: Platform, base_url: str, python_environment: Path) -> None:
    python, script = str(python_environment / "bin" / "python"), str(HERE / "llamaindex_client.py")
    told = await asked(python, script, scripted, base_url, python_environment)
    assert told == {"whole": TEXT, "streamed": TEXT, "completed": TEXT}


async def test_curl(scripted: Platform, base_url: str) -> None:
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    output = await run(
        "curl", "-sN", f"{base_url}/v1/chat/completions", "-d", json.dumps(body),
        "-H", f"authorization: Bearer {scripted.customer.key}", cwd=HERE,
    )  # fmt: skip
    assert output.endswith("data: [DONE]\n\n")
