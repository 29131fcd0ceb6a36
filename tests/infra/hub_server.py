"""A model hub on this machine: what huggingface_hub's client asks of one, and faults on order."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 1 << 16


@dataclass
class HubServer:
    """Repositories by `owner/name`: the files of a directory each."""

    repositories: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """Their files need the token `good`; what describes them is open, as on the public hub."""
    private: set[str] = field(default_factory=set)
    breaks: dict[str, list[int]] = field(default_factory=dict)
    """By file: after how many bytes each of the next answers breaks off."""
    stalls: dict[str, int] = field(default_factory=dict)
    """By file: after how many bytes its answer stops, and waits."""
    broken: set[str] = field(default_factory=set)
    """Files that are answered with 500."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, range)"""
    stalled: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def fetched(self) -> list[str]:
        """The files whose content was asked for, in that order, once for each time."""
        paths = [path for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in paths]


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    hub = HubServer()

    class Handler(_Handler):
        server_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - its base's name
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        resolved = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        described = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        found = resolved or described
        if found is None or not self._may_see(found.group(1)):
            return self._refuse(401 if found else 404, "RepoNotFound")
        name, revision = found.group(1), (resolved or described).group(2 if resolved else 3)  # type: ignore[union-attr]  # one of them matched
        if revision not in (None, "main", REVISION):
            return self._refuse(404, "RevisionNotFound")
        directory = hub.repositories[name]
        if resolved:
            return self._send_file(name, directory / resolved.group(3), resolved.group(3))
        return self._send_json(_tree(directory) if found.group(2) == "tree" else self._info(name))

    def _may_see(self, name: str) -> bool:
        hub = self.server_hub
        return name in hub.repositories and (name not in hub.private or self._has_token())

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == "Bearer good"

    def _info(self, name: str) -> dict[str, Any]:
        hub = self.server_hub
        files = _tree(hub.repositories[name])
        return {
            "id": name,
            "modelId": name,
            "sha": REVISION,
            "private": name in hub.private,
            "gated": "manual" if name in hub.gated else False,
            "tags": [],
            "siblings": [
                {"rfilename": each["path"], "size": each["size"], "blobId": each["oid"]}
                for each in files
            ],
        }

    def _send_file(self, name: str, path: Path, relative: str) -> None:
        hub = self.server_hub
        if name in hub.gated and not self._has_token():
            self._refuse(401, "GatedRepo")
        elif not path.is_file():
            self._refuse(404, "EntryNotFound")
        elif relative in hub.broken:
            self._refuse(500, "")
        else:
            self._send_content(path, relative)

    def _send_content(self, path: Path, relative: str) -> None:
        content = path.read_bytes()
        first, last = _range(self.headers.get("Range"), len(content))
        self.send_response(206 if self.headers.get("Range") else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first))
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            is_header = last < len(content) and first == 0
            self._send_body(relative, content[first:last], is_whole=not is_header)

    def _send_body(self, relative: str, body: bytes, *, is_whole: bool) -> None:
        hub = self.server_hub
        if is_whole and hub.breaks.get(relative):
            self.wfile.write(body[: hub.breaks[relative].pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        sent = 0
        if is_whole and relative in hub.stalls:
            sent = hub.stalls[relative]
            self.wfile.write(body[:sent])
            self.wfile.flush()
            hub.stalled.set()
            while not hub.released.wait(0.05):
                time.sleep(0)
        self.wfile.write(body[sent:])

    def _send_json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _tree(directory: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": str(path.relative_to(directory)),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]


def _range(header: str | None, length: int) -> tuple[int, int]:
    """[first, last) of the bytes that are asked for."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    if found is None:
        return 0, length
    last = int(found.group(2)) + 1 if found.group(2) else length
    return int(found.group(1)), min(last, length)
