"""Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from api.conversation import Choice, Conversation, Tool, ToolUse, template_variables
from api.errors import UnsupportedParameter
from api.schemas.base import RequestBody
from api.schemas.chat import NUM_MESSAGES_MAX, NUM_PARTS_MAX, TextPart
from api.schemas.sampling import NUM_STOPS_MAX, SamplingBody, Stop, Tokens
from api.schemas.tools import DESCRIPTION_LENGTH_MAX, NUM_TOOLS_MAX, FunctionName
from api.structures import structure_of


class ThinkingBlock(RequestBody):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(RequestBody):
    """Thoughts of another service's model, which nobody here can read: they are left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(RequestBody):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    input: dict[str, Any] = {}

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        function = {"name": self.name, "arguments": self.input}
        return {"id": self.id, "type": "function", "function": function}


def _content_branch(content: Any) -> str:
    return "<blocks>" if isinstance(content, list) else "<text>"


TextBlocks = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(max_length=NUM_PARTS_MAX), Tag("<blocks>")],
    Discriminator(_content_branch),
]
"""A string, or text blocks that are joined with nothing between them."""


class ToolResultBlock(RequestBody):
    """What a called function answered."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: TextBlocks = ""
    is_error: bool = False

    def for_template(self) -> dict[str, Any]:
        """A message of the role `tool`."""
        text = joined(self.content)
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


BLOCK_KINDS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


def _block_branch(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"<{kind}>" if isinstance(kind, str) and kind in BLOCK_KINDS else "<text>"


Block = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_block_branch),
]


class AnthropicMessage(RequestBody):
    """One turn. Some clients write the system prompt here, too."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Block], Field(max_length=NUM_PARTS_MAX), Tag("<blocks>")],
        Discriminator(_content_branch),
    ]

    def for_template(self) -> list[dict[str, Any]]:
        """The same as messages of a chat template: results of tools are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = self.content
        results = [block.for_template() for block in blocks if isinstance(block, ToolResultBlock)]
        calls = [block.for_template() for block in blocks if isinstance(block, ToolUseBlock)]
        text = "".join(block.text for block in blocks if isinstance(block, TextPart))
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        message: dict[str, Any] = {"role": self.role, "content": text}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = thoughts
        has_own = bool(text or calls or thoughts or not results)
        return [*results, message] if has_own else results


class AnthropicTool(RequestBody):
    """A function that the model may call."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str = Field(default="", max_length=DESCRIPTION_LENGTH_MAX)
    input_schema: dict[str, Any] = {}
    strict: bool = False

    def tool(self) -> Tool:
        """The same for a conversation."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


class AnthropicToolChoice(RequestBody):
    """`tool_choice`: whether a function must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> "AnthropicToolChoice":
        if self.type == "tool" and self.name is None:
            raise ValueError("a choice of type 'tool' needs a name")
        return self


CHOICES: dict[str, Choice] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class ThinkingChoice(RequestBody):
    """`thinking`: whether a model that can reason should. The budget is the model's own."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None


class CountTokensBody(RequestBody):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str = Field(min_length=1, max_length=300)
    messages: list[AnthropicMessage] = Field(
        min_length=1,
        max_length=NUM_MESSAGES_MAX,
        examples=[[{"role": "user", "content": "What is a prefill?"}]],
    )
    system: TextBlocks = ""
    tools: list[AnthropicTool] = Field(default=[], max_length=NUM_TOOLS_MAX)
    tool_choice: AnthropicToolChoice = AnthropicToolChoice(type="auto")
    thinking: ThinkingChoice | None = None

    def conversation(self) -> Conversation:
        """What the model is told. Raises InvalidRequest."""
        system = joined(self.system)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [part for message in self.messages for part in message.for_template()]
        use = self._tool_use()
        is_thinking = None if self.thinking is None else self.thinking.type != "disabled"
        return Conversation(
            messages=messages,
            tool_use=use,
            structure=structure_of(None, use),
            template_variables=template_variables({}, is_thinking=is_thinking),
            # Anthropic: a last turn of the assistant is the beginning of the answer.
            is_continued=self.messages[-1].role == "assistant" and bool(messages[-1]["content"]),
        )

    def _tool_use(self) -> ToolUse:
        choice = self.tool_choice
        return ToolUse(
            tuple(tool.tool() for tool in self.tools),
            CHOICES[choice.type],
            choice.name if choice.type == "tool" else None,
            is_parallel=not choice.disable_parallel_tool_use and choice.type != "tool",
        )


class MessagesBody(CountTokensBody, SamplingBody):
    """The body of `POST /v1/messages`; the other sampling parameters are extensions."""

    max_tokens: Tokens = Field(examples=[256])
    stop_sequences: list[Stop] = Field(default=[], max_length=NUM_STOPS_MAX)
    container: Any = None
    mcp_servers: list[Any] = []

    @model_validator(mode="after")
    def _is_supported(self) -> "MessagesBody":
        for name in ("container", "mcp_servers"):
            if getattr(self, name):
                raise UnsupportedParameter(f"'{name}' is not supported.", param=name)
        return self


def joined(content: str | list[TextPart]) -> str:
    """The whole text."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)
