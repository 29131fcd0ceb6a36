"""models add, list, show, set, promote, drain, remove: the running supervisor follows the tables."""

import time
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from billing import pricing
from billing.money import DECIMAL_PLACES, format_usd, parse_usd
from billing.pricing import Price, Terms
from common.clock import MICROSECONDS_PER_SECOND, utc_now_us
from engine import additions, catalog
from engine.additions import ModelAddition
from engine.catalog import HostedModel
from engine.errors import ModelRefused
from engine.messages import Heartbeat
from infra.cli.connections import run_in_transaction, run_with_broker
from infra.cli.tables import new_table, print_table
from infra.errors import NotRunning
from infra.local import ready_file
from infra.settings import InfraSettings

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The model's public name.")]
InputPrice = Annotated[str, typer.Option(help="Dollars per million input tokens.")]
CachedPrice = Annotated[str, typer.Option(help="Dollars per million cached input tokens.")]
OutputPrice = Annotated[str, typer.Option(help="Dollars per million output tokens.")]

POLL_S = 0.5
PRICE_COLUMNS = ("$ / M in", "$ / M cached", "$ / M out")
CENT_PLACES = 2


@app.command()
def add(
    source: Annotated[
        str, typer.Argument(help="A directory, a .gguf file, or a hub's owner/name.")
    ],
    input_price: InputPrice,
    cached_price: CachedPrice,
    output_price: OutputPrice,
    name: Annotated[str, typer.Option(help="Public name; that of the source by default.")] = "",
    description: Annotated[str, typer.Option()] = "",
    licence: Annotated[
        str, typer.Option(help="Its licence, where the checkpoint names none.")
    ] = "",
    base: Annotated[str, typer.Option(help="The hosted model that it is a LoRA adapter of.")] = "",
    allow_pickles: Annotated[
        bool,
        typer.Option("--allow-pickles", help="Read weights from *.bin where it has no others."),
    ] = False,
) -> None:
    """Host a model: fetched, checked, loaded and tested beside all that runs, then callable.

    Its precision is the workers' (NCOMPASS_ENGINE_DTYPE, NCOMPASS_ENGINE_QUANTIZATION). int8 is
    faster and answers otherwise: the default model ranks another token first than in fp32 in 5 of
    100 places (KL 0.008), with int8_weight_only in 3 (KL 0.004). How to measure yours:
    docs/operating.md.
    """
    var = InfraSettings().var.resolve()
    ready_file.read(var)  # says what to do where nothing runs
    terms = Terms.checked(*_prices(input_price, cached_price, output_price))

    async def ask(session: AsyncSession) -> str:
        addition = await additions.ask(
            session,
            source=_absolute(source),
            name=name,
            description=description,
            licence=licence,
            base=base,
            allows_pickles=allow_pickles,
            terms=terms.encode(),
        )
        return addition.id

    _follow(run_in_transaction(ask), var)


def _follow(addition_id: str, var: Path) -> None:
    """Print each step until the model is live. Raises ModelRefused with the step that failed, and
    NotRunning when the platform has stopped meanwhile."""

    async def look(session: AsyncSession) -> ModelAddition:
        found = await additions.find(session, addition_id)
        session.expunge(found)
        return found

    shown = ""
    while True:
        addition = run_in_transaction(look)
        if addition.state == "failed":
            raise ModelRefused(f"{addition.failed_step}: {addition.detail}")
        line = f"{addition.state}: {addition.detail}"
        if line != shown:
            typer.echo(line)
            shown = line
        if addition.state == "live":
            typer.echo(f"{addition.name} takes requests now")
            return
        _require_running(var)
        time.sleep(POLL_S)


def _require_running(var: Path) -> None:
    try:
        ready_file.read(var)
    except NotRunning as stopped:
        raise NotRunning(f"{stopped.message} (it then goes on with this addition)") from None


@app.command("set")
def set_price(
    name: Name, input_price: InputPrice, cached_price: CachedPrice, output_price: OutputPrice
) -> None:
    """Change the price from now on; requests keep the one that they were admitted at."""
    prices = _prices(input_price, cached_price, output_price)

    async def work(session: AsyncSession) -> None:
        await catalog.find(session, name)
        await pricing.set_price(session, name, input=prices[0], cached=prices[1], output=prices[2])

    run_in_transaction(work)
    typer.echo(f"{name} costs {_told_prices(prices)} from now on")


@app.command()
def promote(
    name: Name,
    input_price: InputPrice,
    cached_price: CachedPrice,
    output_price: OutputPrice,
    days: Annotated[int, typer.Option(min=1, max=366, help="After so many days it ends.")],
) -> None:
    """Charge a promotional price for some days; then today's price comes back by itself."""
    prices = _prices(input_price, cached_price, output_price)
    until = utc_now_us() + days * 86_400 * MICROSECONDS_PER_SECOND

    async def work(session: AsyncSession) -> None:
        await pricing.promote(
            session, name, input=prices[0], cached=prices[1], output=prices[2], until=until
        )

    run_in_transaction(work)
    typer.echo(f"{name} costs {_told_prices(prices)} for {days} days, then what it cost before")


@app.command("list")
def list_models() -> None:
    """Print the hosted models with their prices, and those that are drained or being added."""

    async def work(
        session: AsyncSession,
    ) -> tuple[list[HostedModel], dict[str, Price], list[tuple[str, str, str]]]:
        coming = await additions.unfinished(session)
        return (
            await catalog.models_in(session, "live", "draining"),
            await pricing.current_prices(session),
            [(each.name or each.source, each.state, each.detail) for each in coming],
        )

    hosted, prices, coming = run_in_transaction(work)
    columns = ("model", "state", "architecture", "context", *PRICE_COLUMNS)
    table = new_table(*columns, num_words=3)
    for model in hosted:
        shown = _shown_prices(prices.get(model.name))
        context = f"{model.context_length:,}"
        table.add_row(model.name, model.state, model.architecture, context, *shown)
    print_table(table)
    for name, state, detail in coming:
        typer.echo(f"{name}: {state}: {detail}")


@app.command()
def show(name: Name) -> None:
    """Print all that is known of one model: its files, its price, and what each worker says of it."""

    async def work(session: AsyncSession) -> tuple[dict[str, str], Price | None]:
        model = await catalog.find(session, name, "live", "draining")
        facts = {
            "state": model.state,
            "path": model.path,
            "revision": model.revision,
            "architecture": model.architecture,
            "context": f"{model.context_length:,} tokens",
            "adapter of": model.base or "-",
            "licence": model.licence or "unknown",
            "description": model.description or "-",
        }
        return facts, (await pricing.current_prices(session)).get(name)

    facts, price = run_in_transaction(work)
    facts["price"] = " / ".join(_shown_prices(price)) + " dollars per million (in, cached, out)"
    for key, value in facts.items():
        typer.echo(f"{key:>13}  {value}".rstrip())
    for beat in _beats(name):
        typer.echo(f"{beat.worker:>13}  {beat.state}: {beat.load_report}")


@app.command()
def drain(name: Name) -> None:
    """Take no more requests for a model; its workers finish what runs, then unload it."""
    _set_state(name, "draining")
    typer.echo(f"{name} is draining: it takes no more requests, until `models add` hosts it again")


@app.command()
def remove(name: Name) -> None:
    """Host a model no more. Its files stay, and so do the books."""
    _set_state(name, "removed")
    typer.echo(f"{name} is removed")


def _set_state(name: str, state: catalog.ModelState) -> None:
    async def work(session: AsyncSession) -> None:
        await catalog.set_state(session, name, state)

    run_in_transaction(work)


def _beats(model: str) -> list[Heartbeat]:
    """What the workers say; nothing where the platform does not run."""
    try:
        ready = ready_file.read(InfraSettings().var.resolve())
    except NotRunning:
        return []
    return run_with_broker(ready.redis_url, lambda broker: broker.heartbeats(model))


def _prices(*dollars: str) -> tuple[int, int, int]:
    given, cached, output = (parse_usd(price) for price in dollars)
    return given, cached, output


def _shown_prices(price: Price | None) -> list[str]:
    if price is None:
        return ["-"] * 3
    return [
        _short(price.input_nano_usd_per_million),
        _short(price.cached_input_nano_usd_per_million),
        _short(price.output_nano_usd_per_million),
    ]


def _told_prices(prices: tuple[int, int, int]) -> str:
    given, cached, output = (f"${_short(price)}" for price in prices)
    return f"{given} in, {cached} cached, {output} out per million tokens"


def _short(amount: int) -> str:
    """At least cents, and every digit that the price has."""
    dollars = format_usd(amount)
    end = len(dollars) - (DECIMAL_PLACES - CENT_PLACES)
    return dollars[:end] + dollars[end:].rstrip("0")


def _absolute(source: str) -> str:
    """A path as the supervisor finds it, wherever this command was run; else a name on a hub."""
    path = Path(source)
    return str(path.resolve()) if path.exists() or path.suffix == ".gguf" else source
