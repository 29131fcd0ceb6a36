"""Text to token ids and back, for the API tier: no torch, no transformers."""

from engine.tokenization.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
