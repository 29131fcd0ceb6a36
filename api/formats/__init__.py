"""The JSON and the events of each protocol: one module each over the same pieces of an answer."""

from api.formats.base import AnswerHead, Format, FormatFactory

__all__ = ["AnswerHead", "Format", "FormatFactory"]
