"""Plants mistakes about money: `python -m tests.billing.kill_mutants [words of a name …]`.

SQLite alone: the mistakes are not about a database. Exits 1 when a mutant lives.
"""

import sys

from tests.billing.mutants import MUTANTS
from tests.mutation import Trial

TRIAL = Trial(
    folders=["common", "accounts", "billing", "engine", "web", "migrations", "tests"],
    options=["-k", "not postgresql"],
)

if __name__ == "__main__":
    sys.exit(TRIAL.run(MUTANTS, sys.argv[1:]))
