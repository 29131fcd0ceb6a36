"""How one sequence's drafts have fared, and what that says of the next ones."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.speculation.prompt_lookup import PromptLookup

PRIOR_RATE = 0.3
PRIOR_TRIALS = 1.0
"""What is expected before anything was tried weighs as much as so many drafts."""
MEMORY = 0.8
"""Weight of a trial beside one that is a step younger: about the last five steps count."""
FADING = 0.98
"""The same for steps without a trial: after some fifty of them another one is made."""


@dataclass(slots=True)
class DraftHistory:
    """Of one sequence; the index of its text is made when the first draft is looked for."""

    _hits: float = 0.0
    _trials: float = 0.0
    _lookup: PromptLookup = field(default_factory=PromptLookup)

    @property
    def rate(self) -> float:
        """The expected part of drafts that are accepted, where those before them were."""
        return (self._hits + PRIOR_RATE * PRIOR_TRIALS) / (self._trials + PRIOR_TRIALS)

    def propose(
        self, token_ids: NDArray[np.int32], num_tokens: int, most: int
    ) -> NDArray[np.int32]:
        """At most `most` tokens that may follow; none where the end of the text is new."""
        return self._lookup.propose(token_ids, num_tokens, most)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """So many of a step's drafts were accepted; the first that was not ends the trial."""
        self._hits = MEMORY * self._hits + num_accepted
        self._trials = MEMORY * self._trials + min(num_drafts, num_accepted + 1)

    def fade(self) -> None:
        """A step passed in which drafts did not pay: what is known of them grows old."""
        self._hits *= FADING
        self._trials *= FADING
