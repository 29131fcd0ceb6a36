"""What a checkpoint brings to turn text into tokens. The worker needs none of it, its callers do."""

from pathlib import Path

from engine.errors import ModelRefused
from engine.models.checkpoint import read_json


def refuse_without_tokenizer(directory: Path) -> None:
    """Raises ModelRefused when there is no `tokenizer.json`, or one that holds no vocabulary."""
    tokenizer = read_json(directory / "tokenizer.json")
    if not isinstance(tokenizer.get("model"), dict):
        raise ModelRefused(f"tokenizer.json in {directory} holds no vocabulary")


def has_chat_template(directory: Path) -> bool:
    """Whether conversations can be rendered; without one the model completes plain text only."""
    if (directory / "chat_template.jinja").is_file():
        return True
    path = directory / "tokenizer_config.json"
    return path.is_file() and bool(read_json(path).get("chat_template"))
