"""Tools as OpenAI's protocols define them, nested in chat completions and flat in responses."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from api.conversation import Tool, ToolUse
from api.schemas.base import RequestBody

NUM_TOOLS_MAX = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]
DESCRIPTION_LENGTH_MAX = 65_536


class FunctionDefinition(RequestBody):
    """A function: its name, what it is for, and a JSON schema of its parameters."""

    name: FunctionName
    description: str = Field(default="", max_length=DESCRIPTION_LENGTH_MAX)
    parameters: dict[str, Any] = {}
    strict: bool = False

    def tool(self) -> Tool:
        """The same for a conversation."""
        return Tool(self.name, self.description, self.parameters, self.strict)


class ToolDefinition(RequestBody):
    """One entry of `tools` in a chat completion."""

    type: Literal["function"]
    function: FunctionDefinition


class FlatToolDefinition(FunctionDefinition):
    """One entry of `tools` in a response."""

    type: Literal["function"]


class NamedFunction(RequestBody):
    """The function that must be called."""

    name: FunctionName


class NamedChoice(RequestBody):
    """`tool_choice` of a chat completion that names a function."""

    type: Literal["function"]
    function: NamedFunction


class FlatNamedChoice(NamedFunction):
    """`tool_choice` of a response that names a function."""

    type: Literal["function"]


def _choice_branch(choice: Any) -> str:
    return "<named>" if isinstance(choice, dict) else "<mode>"


Mode = Annotated[Literal["auto", "none", "required"], Tag("<mode>")]
ToolChoice = Annotated[Mode | Annotated[NamedChoice, Tag("<named>")], Discriminator(_choice_branch)]
FlatToolChoice = Annotated[
    Mode | Annotated[FlatNamedChoice, Tag("<named>")], Discriminator(_choice_branch)
]


def tool_use(
    functions: list[FunctionDefinition],
    choice: Literal["auto", "none", "required"] | NamedChoice | FlatNamedChoice,
    *,
    is_parallel: bool,
) -> ToolUse:
    """The same for a conversation. Raises InvalidRequest."""
    tools = tuple(function.tool() for function in functions)
    if isinstance(choice, str):
        return ToolUse(tools, choice, is_parallel=is_parallel)
    named = choice.function if isinstance(choice, NamedChoice) else choice
    return ToolUse(tools, "required", named.name, is_parallel=False)
