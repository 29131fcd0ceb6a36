"""Plants each mistake in a copy of the tree and asks its tests. The last line is for scripts."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300
NUM_AT_ONCE = 2


@dataclass(frozen=True)
class Mutant:
    """`old`, once in `path`, becomes `new`; `tests`, a file or one of its tests, must notice."""

    name: str
    path: str
    old: str
    new: str
    tests: str


@dataclass(frozen=True)
class Trial:
    """Where mutants are planted, and how their tests are run there."""

    folders: Sequence[str]
    """What the tests need, copied without caches."""
    options: Sequence[str] = ()
    """Of pytest."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, mutants: Sequence[Mutant], words: Sequence[str]) -> int:
        """Plant those whose names hold all the words; 1 when one lives."""
        chosen = [m for m in mutants if all(word in m.name for word in words)]
        with tempfile.TemporaryDirectory(prefix="nc-mutant-") as name:
            tests = {mutant.tests for mutant in chosen}
            assert self._passes(self._copy(Path(name)), tests), "the tests fail without any mutant"
        started = time.monotonic()
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            killed = list(pool.map(self._is_killed, chosen))
        for mutant, is_dead in zip(chosen, killed, strict=True):
            print(f"{'killed' if is_dead else 'LIVES '}  {mutant.name}")
        print(f"{time.monotonic() - started:.0f} s")
        print(f"mutants={len(chosen)} killed={sum(killed)}")
        return 0 if all(killed) else 1

    def _copy(self, directory: Path) -> Path:
        for folder in self.folders:
            shutil.copytree(
                ROOT / folder, directory / folder, ignore=shutil.ignore_patterns("*.pyc")
            )
        shutil.copy(ROOT / "pyproject.toml", directory)
        return directory

    def _is_killed(self, mutant: Mutant) -> bool:
        with tempfile.TemporaryDirectory(prefix="nc-mutant-") as name:
            directory = self._copy(Path(name))
            path = directory / mutant.path
            text = path.read_text()
            assert text.count(mutant.old) == 1, f"{mutant.name}: its place has changed"
            path.write_text(text.replace(mutant.old, mutant.new))
            return not self._passes(directory, {mutant.tests})

    def _passes(self, directory: Path, tests: set[str]) -> bool:
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
                *("-p", "no:randomly", *self.options, *sorted(tests)),
            ],
            cwd=directory,
            env=os.environ
            | self.environment
            | {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=False,
        )
        # A mistake in an address may crash the process: that is noticed as well.
        assert ran.returncode <= 1, f"pytest ended with {ran.returncode}"
        return ran.returncode == 0
