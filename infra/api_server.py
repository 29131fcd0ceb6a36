"""One API process: uvicorn on the supervisor's socket.

`python -m infra.api_server --fd 3 --drain-s 45`.
"""

import argparse
import asyncio
import resource
import socket

import uvicorn

from infra.acceptor import Acceptor
from infra.connection import Connection
from infra.garbage import Collector

KEEP_ALIVE_S = 75
DESCRIPTORS = 65_536
"""A stream is a connection, and a usual shell allows 1,024 of them."""


class ApiServer(uvicorn.Server):
    """uvicorn, but for how connections are accepted and garbage is collected."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener
        self._acceptor: Acceptor | None = None
        self._collector = Collector(is_idle=lambda: not self.server_state.tasks)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the application, then accept."""
        await super().startup(sockets=[])
        self._collector.start()
        self._acceptor = Acceptor(self._listener, self._protocol)
        self._acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, then wait for what runs."""
        if self._acceptor is not None:
            self._acceptor.stop()
        self._listener.close()
        await super().shutdown(sockets=[])
        self._collector.stop()

    def _protocol(self) -> asyncio.Protocol:
        return Connection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


def raise_descriptor_limit() -> None:
    """As many open connections as the system lets this process have, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--drain-s", type=int, required=True, help="of requests at shutdown")
    arguments = parser.parse_args()
    raise_descriptor_limit()
    config = uvicorn.Config(
        "infra.asgi:create_application",
        factory=True,
        ws="none",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=arguments.drain_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        proxy_headers=False,
    )
    ApiServer(config, socket.socket(fileno=arguments.fd)).run()


if __name__ == "__main__":
    main()
