"""LangChain's ChatOpenAI: whole, streamed, tools, structured output. Prints one JSON object."""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

base_url, api_key, model = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{base_url}/v1", api_key=api_key, model=model)


class Weather(BaseModel):
    """A form."""

    city: str


def get_weather(city: str) -> str:
    """The weather somewhere."""
    return city


called = chat.bind_tools([get_weather]).invoke("Hi")
print(
    json.dumps(
        {
            "whole": chat.invoke("Hi").content,
            "streamed": "".join(str(chunk.content) for chunk in chat.stream("Hi")),
            "calls": [call["args"]["city"] for call in called.tool_calls],
            "formed": chat.with_structured_output(Weather, method="json_schema").invoke("Hi").city,
            "forced": chat.with_structured_output(Weather, method="function_calling")
            .invoke("Hi")
            .city,
        }
    )
)
