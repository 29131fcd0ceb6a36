"""LiteLLM as a client of both protocols. Prints one JSON object."""

import json
import sys

import litellm

base_url, api_key, model = sys.argv[1:]
messages = [{"role": "user", "content": "Hi"}]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
openai = {"model": f"openai/{model}", "api_base": f"{base_url}/v1", "api_key": api_key}
anthropic = {"model": f"anthropic/{model}", "api_base": base_url, "api_key": api_key}


def streamed(**client: str) -> str:
    chunks = litellm.completion(messages=messages, stream=True, **client)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def cities(**client: str) -> list[str]:
    answer = litellm.completion(messages=messages, tools=tools, **client)
    return [json.loads(c.function.arguments)["city"] for c in answer.choices[0].message.tool_calls]


try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 9_000}], **openai)
    error = None
except litellm.ContextWindowExceededError:
    error = "ContextWindowExceededError"
print(
    json.dumps(
        {
            "whole": litellm.completion(messages=messages, **openai).choices[0].message.content,
            "streamed": streamed(**openai),
            "anthropic": streamed(**anthropic),
            "calls": cities(**openai),
            "anthropic_calls": cities(**anthropic),
            "error": error,
        }
    )
)
