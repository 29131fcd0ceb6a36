"""Commands and programs that work when pasted."""

import json
import shlex
from dataclasses import dataclass

from starlette.requests import Request

from web.settings import WebSettings

KEY_VARIABLE = "$NCOMPASS_API_KEY"
QUESTION = "Why is the sky blue?"


@dataclass(frozen=True, slots=True)
class Snippets:
    """The same first request in three ways, for one address, model and key."""

    base_url: str
    """With `/v1`."""
    model: str
    key: str = KEY_VARIABLE

    def curl(self) -> str:
        """A streamed chat completion."""
        body = "\n".join(
            (
                "{",
                f'    "model": {json.dumps(self.model)},',
                '    "stream": true,',
                '    "stream_options": {"include_usage": true},',
                f'    "messages": [{{"role": "user", "content": {json.dumps(QUESTION)}}}]',
                "  }",
            )
        )
        return " \\\n  ".join(
            (
                f"curl -N {shlex.quote(self.base_url + '/chat/completions')}",
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
            "stream = client.chat.completions.create(",
            f"    model={json.dumps(self.model)},",
            f'    messages=[{{"role": "user", "content": {json.dumps(QUESTION)}}}],',
            "    stream=True,",
            ")",
            "for chunk in stream:",
            "    if chunk.choices:",
            '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
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
