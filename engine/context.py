"""How long a model's context is, from its `config.json`. Imports no torch: the catalogue asks too."""

from typing import Any

FIELDS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "n_positions",
    "n_ctx",
    "seq_length",
    "max_target_positions",
)
"""In the order of trust; the names that families have used for the same number."""
UNBOUNDED = 32_768
"""For recurrent models, whose configs name no limit: their state does not grow."""


def context_length(config: dict[str, Any]) -> int:
    """Longest prompt plus output of a model with this configuration."""
    for part in (config.get("text_config"), config):
        if isinstance(part, dict):
            for field in FIELDS:
                number = part.get(field)
                if isinstance(number, int) and number > 0:
                    return number
    return UNBOUNDED
