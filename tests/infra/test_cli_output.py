"""What the commands print on a terminal of 40 columns: whole names, whole figures, what was done."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from typer.testing import CliRunner

from accounts import organizations
from accounts.models import User
from billing import ledger, pricing
from billing.ledger import Balance
from engine import catalog
from engine.messages import Heartbeat, WorkerState
from infra.cli import run
from infra.cli.connections import run_in_transaction
from infra.cli.credit import print_balance
from infra.cli.main import app
from infra.errors import NotRunning
from infra.local import ready_file

NAME = "an-organization/a-model-with-a-name-of-fifty-letters"
Ncompass = Callable[..., str]


async def _host(session: AsyncSession) -> None:
    await catalog.add_model(
        session,
        name=NAME,
        path="/models/one",
        revision="0",
        architecture="LlamaForCausalLM",
        dtype="float32",
        context_length=2_048,
    )
    await pricing.set_price(session, NAME, input=20_000_000, cached=5_000_000, output=60_000_000)


@pytest.fixture
def ncompass(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ncompass:
    """`ncompass` on a platform that hosts one model."""
    for name, value in (
        ("NCOMPASS_DATABASE_URL", sqlite_url),
        ("NCOMPASS_VAR", str(tmp_path)),
        ("COLUMNS", "40"),
    ):
        monkeypatch.setenv(name, value)
    run_in_transaction(_host)

    def call(*arguments: str) -> str:
        answer = CliRunner().invoke(app, arguments)
        assert answer.exit_code == 0, answer.output
        return answer.output

    return call


def test_models_are_listed_with_whole_names_and_short_prices(ncompass: Ncompass) -> None:
    listed = ncompass("models", "list").splitlines()
    assert listed[1].split() == [NAME, "live", "LlamaForCausalLM", "2,048", "0.02", "0.005", "0.06"]


def test_a_price_is_told_when_it_is_set_and_when_it_is_promoted(ncompass: Ncompass) -> None:
    prices = ("--input-price", "0.1", "--cached-price", "0.025", "--output-price", "4")
    told = f"{NAME} costs $0.10 in, $0.025 cached, $4.00 out per million tokens"
    assert ncompass("models", "set", NAME, *prices) == f"{told} from now on\n"
    promoted = ncompass("models", "promote", NAME, "--days", "7", *prices)
    assert promoted == f"{told} for 7 days, then what it cost before\n"


def test_a_drained_model_says_how_it_comes_back(ncompass: Ncompass) -> None:
    assert "until `models add` hosts it again" in ncompass("models", "drain", NAME)
    assert ncompass("models", "list").splitlines()[1].split()[:2] == [NAME, "draining"]
    assert "draining" in ncompass("models", "show", NAME)
    ncompass("models", "remove", NAME)
    assert NAME not in ncompass("models", "list")


def test_an_addition_is_not_waited_for_when_the_platform_has_stopped(
    ncompass: Ncompass, tmp_path: Path
) -> None:
    ready_file.write(tmp_path, ready_file.Ready("", "", "", NAME, "", "", "", {}))
    (tmp_path / "m").mkdir()
    prices = ("--input-price", "1", "--cached-price", "1", "--output-price", "1")
    stopping = threading.Timer(1.0, ready_file.remove, (tmp_path,))
    stopping.start()
    told = CliRunner().invoke(app, ("models", "add", str(tmp_path / "m"), *prices))
    stopping.join()
    assert "waiting: for its turn" in told.output
    assert isinstance(told.exception, NotRunning)
    assert "it then goes on with this addition" in told.exception.message


def test_status_names_the_model_of_every_report(
    ncompass: Ncompass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = [_beat("zz/loaded", "ready", "fused"), _beat(NAME, "unloaded", "")]
    monkeypatch.setattr(run, "run_with_broker", lambda url, work: beats)
    ready = ready_file.Ready("http://here/v1", "", "", NAME, "", "", "", {})
    ready_file.write(tmp_path, ready)
    address, head, first, second, report = ncompass("status").splitlines()
    assert address == "http://here/v1"
    assert head.split()[:4] == ["model", "worker", "state", "dtype"]
    assert first.split()[:4] == [NAME, "worker", "unloaded", "bf16"]
    assert second.split()[:3] == ["zz/loaded", "worker", "ready"]
    assert report == "zz/loaded on worker: fused"


def _beat(model: str, state: WorkerState, report: str) -> Heartbeat:
    return Heartbeat(
        worker="worker",
        model=model,
        revision="0",
        state=state,
        sent_ms=0,
        pid=1,
        dtype="bf16",
        context_length=1_024,
        load_report=report,
    )


def test_a_model_tells_its_licence_or_that_it_is_unknown(ncompass: Ncompass) -> None:
    assert "      licence  unknown\n" in ncompass("models", "show", NAME)

    async def name_it(session: AsyncSession) -> None:
        (await catalog.find(session, NAME)).licence = "apache-2.0"

    run_in_transaction(name_it)
    assert "      licence  apache-2.0\n" in ncompass("models", "show", NAME)


def test_taking_more_than_there_is_asks_first(ncompass: Ncompass) -> None:
    async def open_account(session: AsyncSession) -> str:
        owner = User(
            id="usr_1",
            email="ada@example.com",
            email_canonical="ada@example.com",
            password_hash="",
            status="active",
            created_at=0,
        )
        session.add(owner)
        await session.flush()
        made = await organizations.create_organization(session, name="Ada", owner=owner)
        await ledger.open_balance(session, made.id)
        return made.id

    organization = run_in_transaction(open_account)
    adjust = ("credits", "adjust", "--organization", organization, "--reason", "why", "--amount")
    assert "balance      $10.000000000" in ncompass(*adjust, "10")
    assert "balance      $0.000000000" in ncompass(*adjust, "-10"), "down to zero nobody asks"

    for answer in ("n\n", ""):
        refused = CliRunner().invoke(app, (*adjust, "-2.5"), input=answer)
        assert refused.exit_code == 1
        assert "goes from $0.000000000 to -$2.500000000" in refused.output
    assert "balance      $0.000000000" in ncompass(
        "credits", "show", "--organization", organization
    )
    agreed = CliRunner().invoke(app, (*adjust, "-2.5"), input="y\n")
    assert "balance      -$2.500000000" in agreed.output
    assert "balance      -$3.500000000" in ncompass(*adjust, "-1", "--yes")


def test_a_balance_below_zero_has_its_sign_before_the_dollar_and_says_what_it_means(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_balance(Balance(posted=-5_000_000_000, held=0, promotional=0))
    printed = capsys.readouterr()
    assert "balance      -$5.000000000" in printed.out
    assert "nothing runs" in printed.err

    print_balance(Balance(posted=5_000_000_000, held=0, promotional=0))
    printed = capsys.readouterr()
    assert "balance      $5.000000000" in printed.out
    assert not printed.err
