"""Plants mistakes in the Triton kernels: `python -m tests.kernels.kill_mutants [words of a name …]`.

Their tests run in the interpreter. Exits 1 when a mutant lives.
"""

import sys

from tests.kernels.mutants import MUTANTS
from tests.mutation import Trial

TRIAL = Trial(folders=["kernels", "tests"], environment={"TRITON_INTERPRET": "1"})

if __name__ == "__main__":
    sys.exit(TRIAL.run(MUTANTS, sys.argv[1:]))
