"""Who was in a step when it left, to be compared with who is there when it comes back."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Crew:
    """The sequences of a step, and since when each slot was theirs."""

    sequences: list[Sequence]
    """Those of the chunks, then the decoding ones."""
    slots: NDArray[np.intp]
    """Of the same."""
    tenures: NDArray[np.int64]
    """Of the same: how often each slot had been given back."""
    sample_tenures: NDArray[np.int64]
    """[R]: the same of the sampled rows' slots."""
