"""LlamaIndex's OpenAI-like class: whole and streamed. Prints one JSON object."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

base_url, api_key, model = sys.argv[1:]
chat = OpenAILike(
    model=model, api_base=f"{base_url}/v1", api_key=api_key, is_chat_model=True, context_window=8192
)
messages = [ChatMessage(role="user", content="Hi")]
print(
    json.dumps(
        {
            "whole": chat.chat(messages).message.content,
            "streamed": "".join(piece.delta or "" for piece in chat.stream_chat(messages)),
            "completed": chat.complete("Hi").text,
        }
    )
)
