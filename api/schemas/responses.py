"""OpenAI's `POST /v1/responses`: input items, flat tools, a text format."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from api.conversation import Conversation, arguments_for_template, template_variables
from api.errors import InvalidRequest, UnsupportedParameter
from api.schemas.base import RequestBody
from api.schemas.chat import NUM_MESSAGES_MAX, NUM_PARTS_MAX, TOP_LOGPROBS_MAX
from api.schemas.sampling import SamplingBody, Tokens, refuse
from api.schemas.tools import NUM_TOOLS_MAX, FlatToolChoice, FlatToolDefinition, tool_use
from api.structures import (
    GrammarFormat,
    NamedSchema,
    PlainFormat,
    RegexFormat,
    ResponseFormat,
    SchemaFormat,
    structure_of,
)


class InputPart(RequestBody):
    """One piece of a message's content; this version reads text only."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _content_branch(content: Any) -> str:
    return "<parts>" if isinstance(content, list) else "<text>"


ItemContent = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[InputPart], Field(max_length=NUM_PARTS_MAX), Tag("<parts>")],
    Discriminator(_content_branch),
]


def joined(content: str | list[InputPart]) -> str:
    """The whole text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(RequestBody):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": joined(self.content)}


class FunctionCallItem(RequestBody):
    """A call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(max_length=256)
    arguments: str = ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        arguments = arguments_for_template(self.arguments)
        function = {"name": self.name, "arguments": arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionOutputItem(RequestBody):
    """What a called function answered."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: ItemContent

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)}


class ReasoningItem(RequestBody):
    """What a model thought in an earlier turn; it is not told again."""

    type: Literal["reasoning"]


ITEM_KINDS = frozenset({"message", "function_call", "function_call_output", "reasoning"})


def _item_branch(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    return f"<{kind}>" if isinstance(kind, str) and kind in ITEM_KINDS else "<message>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_branch),
]


def _input_branch(given: Any) -> str:
    return "<items>" if isinstance(given, list) else "<text>"


class FlatSchemaFormat(NamedSchema):
    """JSON of a schema, with its fields beside the type."""

    type: Literal["json_schema"]


def _format_branch(content: Any) -> str:
    kind = content.get("type") if isinstance(content, dict) else None
    known = {"json_schema": "<schema>", "regex": "<regex>", "grammar": "<grammar>"}
    return known.get(str(kind), "<plain>")


class TextOptions(RequestBody):
    """`text`: the form of the answer."""

    format: Annotated[
        Annotated[PlainFormat, Tag("<plain>")]
        | Annotated[FlatSchemaFormat, Tag("<schema>")]
        | Annotated[RegexFormat, Tag("<regex>")]
        | Annotated[GrammarFormat, Tag("<grammar>")],
        Discriminator(_format_branch),
    ] = PlainFormat(type="text")

    def response_format(self) -> ResponseFormat:
        """The same as a chat completion says it."""
        if isinstance(self.format, FlatSchemaFormat):
            return SchemaFormat(type="json_schema", json_schema=self.format)
        return self.format


class ReasoningOptions(RequestBody):
    """`reasoning`: how much the model is to think."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesBody(SamplingBody):
    """The body of `POST /v1/responses`. Nothing is stored: `store` is accepted and ignored."""

    input: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Item], Field(min_length=1, max_length=NUM_MESSAGES_MAX), Tag("<items>")],
        Discriminator(_input_branch),
    ] = Field(examples=["What is a prefill?"])
    instructions: str = ""
    max_output_tokens: Tokens | None = None
    tools: list[FlatToolDefinition] = Field(default=[], max_length=NUM_TOOLS_MAX)
    tool_choice: FlatToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    include: list[str] = Field(default=[], max_length=32)
    metadata: dict[str, Any] = Field(default={}, max_length=16)
    previous_response_id: str | None = None
    conversation_: Any = Field(default=None, alias="conversation")
    background: bool = False

    @model_validator(mode="after")
    def _is_supported(self) -> "ResponsesBody":
        if self.previous_response_id is not None or self.conversation_ is not None:
            name = "conversation" if self.previous_response_id is None else "previous_response_id"
            raise UnsupportedParameter(
                f"'{name}' needs stored responses, and this service stores none: send the earlier "
                "items in 'input'.",
                param=name,
            )
        refuse("background", self.background)
        if isinstance(self.input, list) and not self._told():
            raise InvalidRequest("'input' has nothing that the model can be told.", param="input")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As the engine counts: None is off, 0 is the chosen token only."""
        if self.top_logprobs is None and "message.output_text.logprobs" not in self.include:
            return None
        return self.top_logprobs or 0

    def _told(self) -> list[MessageItem | FunctionCallItem | FunctionOutputItem]:
        return [item for item in self.input if not isinstance(item, str | ReasoningItem)]

    def conversation(self) -> Conversation:
        """What the model is told. Raises InvalidRequest."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += _with_calls_together([item.for_template() for item in self._told()])
        use = tool_use(list(self.tools), self.tool_choice, is_parallel=self.parallel_tool_calls)
        return Conversation(
            messages=messages,
            tool_use=use,
            structure=structure_of(self.text.response_format(), use),
            template_variables=template_variables({}, effort=self.reasoning.effort),
        )


def _with_calls_together(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that follow each other, or the text before them, belong to one turn."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if turns and "tool_calls" in message and turns[-1]["role"] == "assistant":
            calls = [*turns[-1].get("tool_calls", ()), *message["tool_calls"]]
            turns[-1] = turns[-1] | {"tool_calls": calls}
        else:
            turns.append(message)
    return turns
