"""Which of a step's drafts have come true: exactly those that would have been said without them.

A token depends on the tokens before it, its request's seed and its position alone, so what a row
samples behind drafts that were right is what a step of its own would have sampled. The run of a
sequence is its leading drafts that equal what was sampled in their place, and one token more.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.batch import StepBatch


@dataclass(frozen=True, slots=True)
class Run:
    """What one sequence says in one step."""

    first_row: int
    """On the [R] axis of its first token."""
    num_drafts: int
    token_ids: list[int]
    """At least one; the last one's KV is not computed. Negative where no logit was finite."""

    @property
    def rows(self) -> range:
        """The rows of its tokens."""
        return range(self.first_row, self.first_row + len(self.token_ids))

    @property
    def last_row(self) -> int:
        """The row of its last token."""
        return self.first_row + len(self.token_ids) - 1

    def until_stop(self, stop_token_ids: tuple[int, ...]) -> "Run":
        """The tokens up to the first that ends the text, and those before one that is no token."""
        token_ids = self.token_ids
        for index in range(len(token_ids) - 1):
            if token_ids[index] in stop_token_ids:
                return replace(self, token_ids=token_ids[: index + 1])
        is_cut = len(token_ids) > 1 and token_ids[-1] < 0
        return replace(self, token_ids=token_ids[:-1]) if is_cut else self


def runs_of(batch: StepBatch, sampled: NDArray[np.int64]) -> list[Run]:
    """The runs of all sampled sequences, in the order of the rows. sampled: [R] token ids."""
    token_ids: list[int] = sampled.tolist()
    if len(batch.drafts) == 0:
        return [Run(row, 0, [token]) for row, token in enumerate(token_ids)]
    first_rows: list[int] = batch.first_rows.tolist()
    num_chunk_rows = len(first_rows) - len(batch.decode_slots)
    runs = [Run(row, 0, [token_ids[row]]) for row in first_rows[:num_chunk_rows]]
    for index, row in enumerate(first_rows[num_chunk_rows:]):
        drafts = batch.drafts_of(index)
        num_right = _num_right(sampled[row : row + len(drafts)], drafts)
        runs.append(Run(row, len(drafts), token_ids[row : row + num_right + 1]))
    return runs


def _num_right(sampled: NDArray[np.int64], drafts: NDArray[np.int32]) -> int:
    wrong = np.flatnonzero(sampled != drafts)
    return int(wrong[0]) if len(wrong) else len(drafts)
