"""`POST /v1/chat/completions`: messages, and the parameters that only chat has."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from api.conversation import Conversation, arguments_for_template, template_variables
from api.errors import InvalidRequest
from api.schemas.base import RequestBody
from api.schemas.sampling import GenerationBody, Tokens, refuse
from api.schemas.tools import NUM_TOOLS_MAX, ToolChoice, ToolDefinition, tool_use
from api.structures import ResponseFormat, structure_of

NUM_MESSAGES_MAX = 10_000
NUM_PARTS_MAX = 10_000
TOP_LOGPROBS_MAX = 20

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(RequestBody):
    """One piece of a message; this version reads text only."""

    type: Literal["text"]
    text: str


class FunctionCall(RequestBody):
    """What an earlier answer of the model called."""

    name: str = Field(max_length=256)
    arguments: str = ""


class ToolCall(RequestBody):
    """A call in an assistant's message of the history."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: with the arguments as an object."""
        arguments = arguments_for_template(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def _content_branch(content: Any) -> str:
    return "<parts>" if isinstance(content, list) else "<text>"


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(max_length=NUM_PARTS_MAX), Tag("<parts>")],
    Discriminator(_content_branch),
]
"""A string, or a list of text parts that are joined with nothing between them."""


class ChatMessage(RequestBody):
    """One turn of the conversation."""

    role: Role
    content: Content | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCall] = Field(default=[], max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self

    @property
    def text(self) -> str:
        """The whole content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; `developer` is the newer name of `system`."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatCompletionBody(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=NUM_MESSAGES_MAX,
        examples=[[{"role": "user", "content": "What is a prefill?"}]],
    )
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP_LOGPROBS_MAX)
    response_format: ResponseFormat | None = None
    tools: list[ToolDefinition] = Field(default=[], max_length=NUM_TOOLS_MAX)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=32)
    """Variables of the model's own chat template, such as `enable_thinking`."""
    functions: list[Any] = Field(default=[], max_length=1_024)
    modalities: list[str] = Field(default=["text"], max_length=8)
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _is_supported(self) -> "ChatCompletionBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "'top_logprobs' is only allowed with 'logprobs': true.", param="top_logprobs"
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidRequest(
                "'continue_final_message' needs a last message of the assistant.", param="messages"
            )
        refuse("functions", bool(self.functions))
        refuse("modalities", self.modalities != ["text"])
        return self

    @property
    def output_limit(self) -> int | None:
        """The caller's limit on output tokens; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As the engine counts: None is off, 0 is the chosen token only."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """What the model is told. Raises InvalidRequest."""
        functions = [tool.function for tool in self.tools]
        use = tool_use(functions, self.tool_choice, is_parallel=self.parallel_tool_calls)
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            tool_use=use,
            structure=structure_of(self.response_format, use),
            template_variables=template_variables(
                self.chat_template_kwargs, effort=self.reasoning_effort
            ),
            is_continued=self.continue_final_message,
        )
