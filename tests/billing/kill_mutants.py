"""Plants each mistake in a copy of the tree and asks its tests. The last line is for scripts.

`python -m tests.billing.kill_mutants [words of a name …]`; exits 1 when a mutant lives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.billing.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FOLDERS = ["common", "accounts", "billing", "engine", "web", "migrations", "tests"]
TIMEOUT_S = 300
NUM_AT_ONCE = 2


def copy_tree(directory: Path) -> Path:
    """What the tests of billing need, without caches."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, directory / folder, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def passes(directory: Path, tests: set[str]) -> bool:
    """Whether these tests pass there. SQLite alone: the mistakes are not about a database."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("-p", "no:randomly", "-k", "not postgresql", *sorted(tests)),
        ],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode in (0, 1), f"pytest ended with {ran.returncode}"
    return ran.returncode == 0


def is_killed(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory(prefix="nc-mutant-") as name:
        directory = copy_tree(Path(name))
        path = directory / mutant.path
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: its place has changed"
        path.write_text(text.replace(mutant.old, mutant.new))
        return not passes(directory, {mutant.tests})


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if all(word in m.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="nc-mutant-") as name:
        tests = {mutant.tests for mutant in chosen}
        assert passes(copy_tree(Path(name)), tests), "the tests fail without any mutant"
    started = time.monotonic()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        killed = list(pool.map(is_killed, chosen))
    for mutant, is_dead in zip(chosen, killed, strict=True):
        print(f"{'killed' if is_dead else 'LIVES '}  {mutant.name}")
    print(f"{time.monotonic() - started:.0f} s")
    print(f"mutants={len(chosen)} killed={sum(killed)}")
    return 0 if all(killed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
