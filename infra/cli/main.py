"""`ncompass`: run the platform, look after its money and its models."""

import sys

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from redis.exceptions import RedisError
from sqlalchemy.exc import OperationalError

from common.errors import PlatformError
from infra.cli import books, credit, models, run, simulate

app = typer.Typer(
    help="Run nCompass on this machine, and look after its money and its models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("up")(run.up)
app.command("demo")(run.demo)
app.command("migrate")(run.migrate)
app.command("status")(run.status)
app.command("reconcile")(books.reconcile)
app.command("check-integrity")(books.check_integrity)
app.command("simulate")(simulate.simulate)
app.add_typer(credit.app, name="credits", help="Look at an organization's credit, or adjust it.")
app.add_typer(models.app, name="models", help="Host models.")


def main() -> None:
    """Run a command; an expected failure is one line and exit status 1."""
    try:
        app()
    except PlatformError as failure:
        sys.exit(f"ncompass: {failure.message}")
    except OperationalError as failure:
        sys.exit(f"ncompass: the database does not answer: {failure.orig}")
    except RedisError as failure:
        sys.exit(f"ncompass: Redis does not answer: {failure}")
    except ValidationError as failure:
        wrong = failure.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in wrong["loc"])
        sys.exit(f"ncompass: the setting {name} of {failure.title} is wrong: {wrong['msg']}")
    except SettingsError as failure:
        sys.exit(f"ncompass: {failure}")


if __name__ == "__main__":
    main()
