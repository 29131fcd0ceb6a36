"""schemathesis over our own OpenAPI document, against the API by a real uvicorn.

It brings many packages and a pytest plug-in, so that it has an environment of its own below
`var/clients`, and runs with `make test-clients`.
"""

import sys
from pathlib import Path

import pytest

from tests.api.clients.test_heavy_clients import ENVIRONMENTS, HERE, run
from tests.api.conftest import Platform

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

SCHEMATHESIS = "schemathesis==4.32.5"
EXCLUDED = (
    # Whether a body is good is for the model, the credit and the tokenizer to say, too: what the
    # document allows may still be a 4xx, and a field that is ignored may have any value.
    "positive_data_acceptance",
    "negative_data_rejection",
)
SECONDS = 90
EXAMPLES = 30


@pytest.fixture
async def schemathesis() -> Path:
    """The command, installed when it is missing or another version."""
    directory = ENVIRONMENTS / "schemathesis"
    stamp = directory / "package"
    if not stamp.is_file() or stamp.read_text() != SCHEMATHESIS:
        await run(sys.executable, "-m", "venv", str(directory), cwd=HERE)
        await run(str(directory / "bin" / "pip"), "install", "-q", SCHEMATHESIS, cwd=directory)
        stamp.write_text(SCHEMATHESIS)
    return directory / "bin" / "schemathesis"


async def test_what_the_document_says_is_what_the_server_does(
    platform: Platform, base_url: str, schemathesis: Path, tmp_path: Path
) -> None:
    platform.say("Hello, Ada")
    customer = await platform.issue(platform.customer)
    # The name of the scheme in the document is `bearer`; its key in this file is, too.
    config = f'[auth.openapi.bearer]\nbearer = "{customer.key}"\n'
    (tmp_path / "schemathesis.toml").write_text(config)
    await run(
        str(schemathesis), "run", f"{base_url}/v1/openapi.json",
        "--exclude-checks", ",".join(EXCLUDED), "--phases", "examples,coverage,fuzzing",
        "--max-examples", str(EXAMPLES), "--max-time", str(SECONDS), "--seed", "1",
        "--continue-on-failure", "--no-color",
        cwd=tmp_path,
    )  # fmt: skip
    assert (await platform.chat()).json()["choices"][0]["message"]["content"] == "Hello, Ada"
    assert (await platform.settled()).held == 0
