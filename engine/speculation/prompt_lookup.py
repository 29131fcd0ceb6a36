"""Where the end of a text stood before in it: the match finder of prompt lookup.

    drafts = tokens[m + 1 :]   where tokens[.. m] ends as tokens[.. last] does

It is zlib's: a table from the hash of two tokens to the last place where they stood, and for each
place the one before it with the same hash. A token is added in constant time, and a search looks at
`MAX_CANDIDATES` places. Two arrays of int32 are all the memory that it takes, 8 to 12 bytes a token.

Source: prompt lookup decoding (Saxena 2023); hash chains as in RFC 1951, section 4.
"""

import numpy as np
from numpy.typing import NDArray

LONGEST_MATCH = 4
"""Tokens that are compared; the longest match wins, of equal ones the latest."""
MAX_CANDIDATES = 8
FEW = 16
"""So many tokens are added one by one; more of them are sorted by hash."""
NOWHERE = -1
_FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B1, 0x85EBCA6B
_HASH_BITS = 32
_LOW_BITS = (1 << _HASH_BITS) - 1


class PromptLookup:
    """The index of one text that grows at its end."""

    def __init__(self) -> None:
        self._num_added = 1
        """Positions that the index knows; the first has no token before it."""
        self._shift = _HASH_BITS
        self._last: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        """By hash: the last position whose token and the one before it have it."""
        self._previous: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        """By position: the one before it with the same hash."""

    def propose(
        self, token_ids: NDArray[np.int32], num_tokens: int, most: int
    ) -> NDArray[np.int32]:
        """What may follow token_ids[:num_tokens]: `most` tokens, or none where nothing matches.

        A match near the end is continued with itself, as often as it takes.
        """
        if num_tokens < 3 or most < 1:
            return token_ids[:0]
        self._add(token_ids, num_tokens - 1)
        match = self._longest_match(token_ids, num_tokens - 1)
        if match == NOWHERE:
            return token_ids[:0]
        return np.resize(token_ids[match + 1 : num_tokens], most)

    def _longest_match(self, token_ids: NDArray[np.int32], last: int) -> int:
        tail: list[int] = token_ids[max(0, last + 1 - LONGEST_MATCH) : last + 1].tolist()[::-1]
        place = int(self._last[self._hash(tail[1], tail[0])])
        best, best_length = NOWHERE, 1
        for _ in range(MAX_CANDIDATES):
            if place == NOWHERE:
                break
            start = max(0, place + 1 - len(tail))
            before: list[int] = token_ids[start : place + 1].tolist()[::-1]
            length = _num_common(tail, before)
            if length > best_length:
                best, best_length = place, length
            if best_length == LONGEST_MATCH:
                break
            place = int(self._previous[place])
        return best

    def _add(self, token_ids: NDArray[np.int32], end: int) -> None:
        """Let the index know all positions before `end`."""
        if len(token_ids) > len(self._previous):
            self._start_over(len(token_ids))
        first = self._num_added
        if end - first > FEW:
            self._add_many(token_ids, first, end)
        else:
            tokens: list[int] = token_ids[first - 1 : end].tolist()
            for position in range(first, end):
                key = self._hash(tokens[position - first], tokens[position - first + 1])
                self._previous[position] = self._last[key]
                self._last[key] = position
        self._num_added = max(first, end)

    def _add_many(self, token_ids: NDArray[np.int32], first: int, end: int) -> None:
        tokens = token_ids[first - 1 : end].astype(np.uint64)
        mixed = tokens[:-1] * np.uint64(_FIRST_FACTOR) + tokens[1:] * np.uint64(_SECOND_FACTOR)
        keys = ((mixed & np.uint64(_LOW_BITS)) >> np.uint64(self._shift)).astype(np.int64)
        order = np.argsort(keys, kind="stable")
        keys, positions = keys[order], (order + first).astype(np.int32)
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = keys[1:] != keys[:-1]
        is_last = np.roll(is_first, -1)
        self._previous[positions] = np.where(is_first, self._last[keys], np.roll(positions, 1))
        self._last[keys[is_last]] = positions[is_last]

    def _start_over(self, capacity: int) -> None:
        """The text has outgrown the arrays: they are made anew with the size of its buffer."""
        bits = max(6, (capacity - 1).bit_length())
        self._shift = _HASH_BITS - bits
        self._last = np.full(1 << bits, NOWHERE, dtype=np.int32)
        self._previous = np.full(capacity, NOWHERE, dtype=np.int32)
        self._num_added = 1

    def _hash(self, first: int, second: int) -> int:
        return (first * _FIRST_FACTOR + second * _SECOND_FACTOR & _LOW_BITS) >> self._shift


def _num_common(one: list[int], other: list[int]) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
