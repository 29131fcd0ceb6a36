"""A conversation with its tools, whatever protocol it came by: what a chat template renders."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from api.errors import InvalidRequest
from api.outputs.reading import PLAIN, Reading, syntax_of, thinking_of
from engine.messages import Structure
from engine.tokenization import Tokenizer

Choice = Literal["auto", "none", "required"]
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"bos_token", "eos_token", "unk_token", "pad_token", "sep_token"}
)
"""What the platform gives to the template, and no caller may."""
TOOLS_LENGTH_MAX = 131_072
"""Of the form that the arguments of tools must have, as JSON."""
THOUGHT_TAIL_TOKENS = 12
"""How far from the end of a prompt the marker that opens the reasoning is looked for."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """A JSON schema; empty for a function without parameters."""
    is_strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments."""
        return self.parameters or {
            "type": "object",
            "properties": {},
            "additionalProperties": False,
        }

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which functions there are, and whether one must be called. Raises InvalidRequest."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "auto"
    name: str | None = None
    """With `required`: the one function that must be called."""
    is_parallel: bool = True

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("Two tools have the same name.", param="tools")
        if self.choice == "required" and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")
        if self.name is not None and self.name not in names:
            raise InvalidRequest("'tool_choice' names no tool of 'tools'.", param="tool_choice")

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.name in (None, tool.name))


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model is told, and what is expected of its answer."""

    messages: list[dict[str, Any]]
    """As chat templates expect them; every `content` is a string."""
    tool_use: ToolUse = ToolUse()
    structure: Structure | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    is_continued: bool = False
    """The last message is the beginning of the answer."""

    @property
    def num_characters(self) -> int:
        """How long it is, roughly: what bounds the work of rendering it."""
        tools = sum(len(json.dumps(tool.parameters)) for tool in self.tool_use.offered)
        return tools + sum(len(message["content"]) for message in self.messages)

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        """The tools that are offered; a list where old calls or results must be rendered, too."""
        tools = [tool.for_template() for tool in self.tool_use.offered]
        has_history = any(m["role"] == "tool" or "tool_calls" in m for m in self.messages)
        return tools if tools or has_history else None

    def reading(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> Reading:
        """How the answer's text is to be read."""
        offered = self.tool_use.offered
        thinking = thinking_of(tokenizer.template_source)
        begins_in_thought = thinking is not None and _ends_with(
            tokenizer, prompt_token_ids, thinking.begin
        )
        if self.structure is not None and not begins_in_thought:
            thinking = None  # the form binds from the first token: there is no room for thought
        if thinking is None and not offered:
            return PLAIN
        return Reading(
            thinking=thinking,
            begins_in_thought=begins_in_thought,
            names=frozenset(tool.name for tool in offered),
            syntax=syntax_of(tokenizer.template_source) if offered else None,
            is_forced=self.tool_use.choice == "required",
            is_parallel=self.tool_use.is_parallel,
        )

    def structure_for(self, reading: Reading, tokenizer: Tokenizer) -> Structure | None:
        """The form of the answer; behind the thought that the prompt has opened, if any.

        Without a form of its own, an answer may call: then the arguments of tools that are `strict`
        have their schema; not where the thoughts of a model end with more than one token. There a
        form of its own raises InvalidRequest.
        """
        structure = self.structure or self._promised_calls(reading, tokenizer)
        if structure is None or not reading.begins_in_thought:
            return structure
        assert reading.thinking is not None
        end = tokenizer.token_id(reading.thinking.end)
        if end is None and self.structure is None:
            return None
        if end is None:
            raise InvalidRequest(
                "No form can be required of this model's answers while it reasons.",
                param="response_format",
            )
        return Structure(structure.kind, structure.source, begins_after=end)

    def _promised_calls(self, reading: Reading, tokenizer: Tokenizer) -> Structure | None:
        tools = self.tool_use.offered
        syntax = reading.syntax
        if syntax is None or syntax.form is None or not any(tool.is_strict for tool in tools):
            return None
        schemas = {
            tool.name: tool.schema if tool.is_strict else {"type": "object"} for tool in tools
        }
        tags = syntax.form.tags(
            schemas,
            syntax.markers,
            tokenizer.token_id,
            is_parallel=self.tool_use.is_parallel,
        )
        source = json.dumps(tags)
        if len(source) > TOOLS_LENGTH_MAX:
            raise InvalidRequest(
                "The tools are too long for one of them to be 'strict'.", param="tools"
            )
        return Structure("structural_tag", source)


def _ends_with(tokenizer: Tokenizer, token_ids: list[int], text: str) -> bool:
    """Whether a prompt ends with `text`, white space apart."""
    tail = map(tokenizer.token_text, token_ids[-THOUGHT_TAIL_TOKENS:])
    return b"".join(tail).rstrip().endswith(text.encode())


def arguments_for_template(arguments: str) -> Any:
    """The arguments of an old call: templates write objects, OpenAI's clients send text."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def template_variables(
    given: Mapping[str, Any], *, effort: str | None = None, is_thinking: bool | None = None
) -> dict[str, Any]:
    """Variables for the chat template: the caller's own, and how much the model is to reason."""
    variables = {name: value for name, value in given.items() if name not in RESERVED_VARIABLES}
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        is_thinking = effort != "none"
    if is_thinking is not None:
        variables.setdefault("enable_thinking", is_thinking)
    return variables
