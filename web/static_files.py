"""Style sheet, script and icon: read once at start, named by their content.

A page links `/static/app.css?v=<hash>`; that address may be kept for a year, because other content
has another address. The bare address is revalidated each time.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

KEEP_FOR_A_YEAR = "public, max-age=31536000, immutable"
REVALIDATE = "public, no-cache"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file in memory."""

    content: bytes
    media_type: str
    version: str
    """The first 16 hexadecimal digits of the content's SHA-256."""


class StaticFiles:
    """The files of one folder. A request can name only what was in it at start."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.name: _read(path) for path in folder.iterdir() if path.suffix in MEDIA_TYPES
        }

    def url(self, name: str) -> str:
        """The address of a file, with its version."""
        return f"/static/{name}?v={self._files[name].version}"

    async def serve(self, request: Request) -> Response:
        """Answer `GET /static/{name}`."""
        file = self._files.get(request.path_params["name"])
        if file is None:
            raise HTTPException(404)
        is_exact = request.query_params.get("v") == file.version
        headers = {
            "cache-control": KEEP_FOR_A_YEAR if is_exact else REVALIDATE,
            "etag": f'"{file.version}"',
        }
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    version = hashlib.sha256(content).hexdigest()[:16]
    return StaticFile(content, MEDIA_TYPES[path.suffix], version)
