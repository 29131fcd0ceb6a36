"""The set-up before anything is installed: old Pythons, interruptions, pip's words, pinned versions."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra import environment, pip_progress
from infra.pip_progress import Stage

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "infra" / "bootstrap.py"


def test_the_bootstrap_can_be_read_by_the_first_python_3() -> None:
    ast.parse(BOOTSTRAP.read_text(), feature_version=(3, 4))


def test_an_old_python_gets_one_line_that_says_what_to_do() -> None:
    code = f"""
import os, runpy, sys
sys.version_info = (3, 8, 1)
os.environ["PATH"] = ""
runpy.run_path({str(BOOTSTRAP)!r}, run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "3.11, 3.12 or 3.13" in ran.stderr
    assert "is 3.8" in ran.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment elsewhere, whose venv and pip only leave marks."""
    folder = tmp_path / ".venv"
    monkeypatch.setattr(environment, "ENVIRONMENT", folder)
    monkeypatch.setattr(environment, "STATE", folder / "ncompass.json")
    monkeypatch.setattr(environment, "is_usable", (folder / "bin" / "python").exists)

    def create(path: Path, **_: Any) -> None:
        (path / "bin").mkdir(parents=True, exist_ok=True)
        (path / "bin" / "python").touch()

    def pip(heading: str, arguments: list[str]) -> None:
        (folder / "bin" / "ncompass").touch()

    monkeypatch.setattr("venv.create", create)
    monkeypatch.setattr(environment, "pip", pip)
    return folder


def test_a_complete_environment_is_left_alone(folder: Path) -> None:
    environment.set_up("run")
    assert environment.is_complete("run")
    assert not environment.is_complete("test")
    environment.set_up("test")
    assert environment.is_complete("test")
    assert environment.is_complete("run")


def test_an_interrupted_set_up_is_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(heading: str, arguments: list[str]) -> None:
        (folder / "half-a-package").touch()
        raise KeyboardInterrupt

    whole_pip = environment.pip
    monkeypatch.setattr(environment, "pip", killed)
    with pytest.raises(KeyboardInterrupt):
        environment.set_up("run")
    assert json.loads((folder / "ncompass.json").read_text())["complete"] is False

    monkeypatch.setattr(environment, "pip", whole_pip)
    environment.set_up("run")
    assert "interrupted" in capsys.readouterr().out
    assert not (folder / "half-a-package").exists()
    assert environment.is_complete("run")


def test_a_full_disk_is_told_before_anything_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environment.REQUIRED_BYTES, "run", 10**18)
    with pytest.raises(environment.SetUpStopped, match=r"disk full: .* make room, then run again"):
        environment.set_up("run")
    assert not folder.exists()


def test_progress_follows_what_pip_says() -> None:
    stage = Stage()
    pip_progress._advance(stage, "Collecting torch==2.13.0")
    assert stage.doing == "looking up versions: torch==2.13.0"
    pip_progress._advance(stage, "Downloading torch-2.13.0-cp311-cp311-linux.whl (191.4 MB)")
    assert stage.doing == "downloading torch-2.13.0 (191.4 MB)"
    pip_progress._advance(stage, "Installing collected packages: mpmath, sympy, torch")
    assert (stage.doing, stage.num_to_install) == ("installing", 3)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["ERROR: Could not install packages: [Errno 28] No space left on device"],
            "disk full while installing; make room, then run again",
        ),
        (
            [
                "ERROR: Could not find a version that satisfies the requirement x==9",
                "ERROR: No matching distribution found for x==9",
            ],
            "ERROR: Could not find a version that satisfies the requirement x==9"
            " Is a package index reachable?",
        ),
        (
            [
                "error: subprocess-exited-with-error",
                "error: package directory 'kernels' does not exist",
                "error: metadata-generation-failed",
            ],
            "error: package directory 'kernels' does not exist",
        ),
    ],
)
def test_a_failed_install_is_told_by_the_line_that_explains_it(
    lines: list[str], reason: str
) -> None:
    assert pip_progress._reason(lines) == reason


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    pinned = {canonicalize_name(name): version for name, version in pairs}
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for requirement in map(Requirement, asked):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_no_file_of_the_repository_names_a_package_registry() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    hosts = re.compile(r"py" + r"pi\.org|pythonhosted\.org|registry\.npm" + r"js|download\.pytorch")
    for name in names.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in {".png", ".ico"}:
            assert not hosts.search(path.read_text(errors="ignore")), name
