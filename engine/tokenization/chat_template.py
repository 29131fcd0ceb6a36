"""The model's own chat template, in a sandbox, with user text that cannot forge control tokens.

A message may contain the text of a control token (`<|im_end|>`). Rendered and tokenized as it is,
it would *be* that token, and the writer could open turns in another's name. So each occurrence is
broken with a mark before rendering, and the rendered text is tokenized in pieces cut at the marks.
Text without control tokens, the normal case, is tokenized exactly as transformers does it.
"""

import json
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols

from engine.errors import TemplateRejected
from engine.tokenization.generation_tag import GenerationTag
from engine.tokenization.template_bounds import BoundedEnvironment
from engine.tokenization.tool_prompt import with_tools_described

MARK_CHARACTERS = "".join(chr(code) for code in range(0xF0000, 0xF0400))
MIN_FRAGMENT = 2
"""Characters of a control token at the edge of a string that count as a part of one."""


class ChatTemplate:
    """Renders conversations. `special_tokens` are the control tokens' texts."""

    def __init__(
        self, source: str, *, special_tokens: Iterable[str], variables: dict[str, str]
    ) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now_in_words
        self._environment = environment
        self._template = environment.template(source)
        self.source = source
        self.knows_tools = re.search(r"\btools\b", source) is not None
        """Whether it renders the definitions of tools."""
        self._variables = variables
        # NOTE: drawn at random, so that no caller can write the mark himself.
        self._mark = "".join(secrets.choice(MARK_CHARACTERS) for _ in range(8))
        texts = sorted((text for text in special_tokens if len(text) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        lengths = range(MIN_FRAGMENT, max(map(len, texts), default=0))
        self._fragment_lengths = lengths
        self._beginnings = {text[:n] for text in texts for n in lengths if n < len(text)}
        self._ends = {text[-n:] for text in texts for n in lengths if n < len(text)}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[str]:
        """The rendered conversation in pieces to tokenize one by one; usually a single one.

        `continue_final_message` leaves the last message open, for the model to go on with it.
        Raises TemplateRejected with the template's own words when it refuses the messages.
        """
        if variables.get("tools") is not None and not self.knows_tools:
            messages = with_tools_described(messages, variables["tools"])
        try:
            safe_messages = [self._safe_message(message) for message in messages]
            given = {"tools": None, "documents": None} | {
                name: self._safe(value) for name, value in variables.items()
            }
            self._environment.begin()
            rendered = self._template.render(
                messages=safe_messages,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **self._variables,
                **given,
            )
        except jinja2.TemplateError as error:
            raise TemplateRejected(f"The model's chat template refused: {error}") from error
        except Exception as error:
            # The template is foreign code: whatever it stumbles over, it cannot render this.
            raise TemplateRejected(
                "The model's chat template cannot render these messages."
            ) from error
        if continue_final_message:
            rendered = _open_end(rendered, safe_messages[-1]["content"])
        return rendered.split(self._mark)

    def _safe_message(self, message: dict[str, Any]) -> dict[str, Any]:
        # As transformers does: many templates print "None" or fail for a key that is there.
        given = {name: value for name, value in message.items() if value is not None}
        if given.get("role") == "developer":
            given["role"] = "system"
        # Joined first: two parts, each harmless, may make a control token together.
        if isinstance(content := given.get("content"), list):
            given["content"] = "".join(part["text"] for part in content if part["type"] == "text")
        # The role is not the writer's to choose; templates compare it and build tokens from it.
        return {name: v if name == "role" else self._safe(v) for name, v in given.items()}

    def _safe(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._break_edges(self._break_control_tokens(value))
        if isinstance(value, list):
            return [self._safe(item) for item in value]
        if isinstance(value, dict):
            return {name: self._safe(item) for name, item in value.items()}
        return value

    def _break_control_tokens(self, text: str) -> str:
        # Breaking one token may leave another that overlapped it, so again until none is left.
        while self._control.search(text):
            text = self._control.sub(lambda found: found[0][0] + self._mark + found[0][1:], text)
        return text

    def _break_edges(self, text: str) -> str:
        """Cut off what a neighbour in the rendered text could complete to a control token."""
        if any(text[-n:] in self._beginnings for n in self._fragment_lengths):
            text = text + self._mark
        if any(text[:n] in self._ends for n in self._fragment_lengths):
            text = self._mark + text
        return text


def _open_end(rendered: str, content: str) -> str:
    """The text up to the end of its last message, whose end the template has written already."""
    content = content.strip()
    start = rendered.rfind(content)
    if start < 0:
        raise TemplateRejected("The model's chat template cannot leave the last message open.")
    return rendered[: start + len(content)]


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now_in_words(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # transformers' form: not HTML-escaped, non-ASCII kept.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
