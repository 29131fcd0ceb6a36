"""Commands and programs that work when pasted."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from engine.pooling import ModelKind
from web.settings import WebSettings

KEY_VARIABLE = "$NCOMPASS_API_KEY"
QUESTION = "Why is the sky blue?"
DOCUMENTS = '["Air scatters blue light most.", "Bread needs yeast."]'

_REQUESTS: dict[ModelKind, tuple[str, tuple[str, ...]]] = {
    "generate": (
        "/chat/completions",
        (
            '    "stream": true,',
            '    "temperature": 0.2,',
            '    "stream_options": {"include_usage": true},',
            f'    "messages": [{{"role": "user", "content": {json.dumps(QUESTION)}}}]',
        ),
    ),
    "embed": ("/embeddings", (f'    "input": {json.dumps(QUESTION)}',)),
    "rerank": (
        "/rerank",
        (f'    "query": {json.dumps(QUESTION)},', f'    "documents": {DOCUMENTS}'),
    ),
}
"""By kind of model: the route, and the lines of the body behind its name."""


def _chat_call(model: str) -> list[str]:
    return [
        "stream = client.chat.completions.create(",
        f"    model={model},",
        f'    messages=[{{"role": "user", "content": {json.dumps(QUESTION)}}}],',
        "    temperature=0.2,",
        "    stream=True,",
        ")",
        "for chunk in stream:",
        "    if chunk.choices:",
        '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    ]


def _embeddings_call(model: str) -> list[str]:
    return [
        f"answer = client.embeddings.create(model={model}, input={json.dumps(QUESTION)})",
        "print(len(answer.data[0].embedding), answer.data[0].embedding[:3])",
    ]


def _rerank_call(model: str) -> list[str]:
    return [
        "body = {",
        f'    "model": {model},',
        f'    "query": {json.dumps(QUESTION)},',
        f'    "documents": {DOCUMENTS},',
        "}",
        'print(client.post("/rerank", body=body, cast_to=object))',
    ]


_CALLS: dict[ModelKind, Callable[[str], list[str]]] = {
    "generate": _chat_call,
    "embed": _embeddings_call,
    "rerank": _rerank_call,
}


@dataclass(frozen=True, slots=True)
class Snippets:
    """The same first request in three ways, for one address, model and key."""

    base_url: str
    """With `/v1`."""
    model: str
    key: str = KEY_VARIABLE

    kind: ModelKind = "generate"
    """What the model answers with, which decides what is asked of it."""

    def curl(self) -> str:
        """A streamed chat completion; of other models a vector, or scores."""
        route, lines = _REQUESTS[self.kind]
        body = "\n".join(("{", f'    "model": {json.dumps(self.model)},', *lines, "  }"))
        return " \\\n  ".join(
            (
                f"curl -N {shlex.quote(self.base_url + route)}",
                f'-H "Authorization: Bearer {self.key}"',
                '-H "Content-Type: application/json"',
                f"-d {shlex.quote(body)}",
            )
        )

    def python(self) -> str:
        """The same with OpenAI's client."""
        key = 'os.environ["NCOMPASS_API_KEY"]' if self.key == KEY_VARIABLE else json.dumps(self.key)
        lines = [
            *(["import os", ""] if self.key == KEY_VARIABLE else []),
            "from openai import OpenAI",
            "",
            f"client = OpenAI(base_url={json.dumps(self.base_url)}, api_key={key})",
            *_CALLS[self.kind](json.dumps(self.model)),
        ]
        return "\n".join(lines)

    def credits(self) -> str:
        """Asks for the balance."""
        address = shlex.quote(f"{self.base_url}/credits")
        return f'curl {address} -H "Authorization: Bearer {self.key}"'


def base_url(request: Request, settings: WebSettings) -> str:
    """The API's address for clients, with `/v1` and without a slash at the end."""
    if settings.public_url is not None:
        return str(settings.public_url).rstrip("/") + "/v1"
    scheme = "https" if settings.is_tls else request.url.scheme
    return f"{scheme}://{request.url.netloc}/v1"
