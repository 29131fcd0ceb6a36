"""Tools for models whose chat template knows none: described in the system message, as Hermes does.

The layout is that of Hermes and Qwen, which many models have seen in training.
"""

import json
from collections.abc import Sequence
from typing import Any

INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools_described(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation in roles that every template knows: calls and results become text."""
    described = [_as_text(message) for message in messages]
    if not tools:
        return described
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = INSTRUCTIONS.format(tools=lines)
    if described and described[0]["role"] == "system":
        first = described[0]
        described[0] = first | {"content": f"{first['content']}\n\n{instructions}"}
        return described
    return [{"role": "system", "content": instructions}, *described]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = [_call_text(call["function"]) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    text = message.get("content") or ""
    return {"role": message["role"], "content": "\n".join([text, *calls] if text else calls)}


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
