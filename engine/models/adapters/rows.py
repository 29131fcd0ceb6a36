"""Which rows of a step belong to which adapter; rows of the base model alone belong to none."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Groups = tuple[tuple[int, torch.Tensor], ...]
"""(number of an adapter, its rows: int64), each row once."""


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of one step. Adapters are numbered from 1."""

    by_sequence: NDArray[np.int32]
    """[S]: the adapter of each sequence, 0 for none."""
    tokens: Groups
    """Rows of the [T] axis."""
    samples: Groups
    """Rows of the [R] axis: of those whose logits are wanted."""

    @classmethod
    def build(
        cls,
        by_sequence: NDArray[np.int32],
        query_start: NDArray[np.int32],
        rows: NDArray[np.int64],
        device: torch.device,
    ) -> "AdapterRows":
        """From [S] adapters, [S + 1] starts of their tokens, and the [R] rows that are wanted."""
        by_token = np.repeat(by_sequence, np.diff(query_start))
        return cls(by_sequence, _groups(by_token, device), _groups(by_token[rows], device))


def _groups(by_row: NDArray[np.int32], device: torch.device) -> Groups:
    numbers = np.unique(by_row[by_row > 0]).tolist()
    return tuple(
        (number, torch.from_numpy(np.flatnonzero(by_row == number)).to(device))
        for number in numbers
    )
