"""Runs the server on a socket until a signal ends it."""

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.concurrency import run_in_threadpool

from tigon.serve.app import Service, make_app
from tigon.serve.engine import Engine

FINISHING_SECONDS = 10  # after SIGTERM, for requests that are being answered
# That a connection may be idle: longer than clients keep one (httpx 5, aiohttp 15, nginx 60), who
# would else send a request into a connection that is being closed, and get no answer
KEEP_ALIVE_SECONDS = 75
# Seconds after which a thread lets another one run. By Python's 5 ms the engine, which has to start
# a step every few, would often wait for the one that writes to clients
SWITCH_SECONDS = 5e-4


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; raises OSError that says what to do for one that cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only for sockets that name TCP asyncio turns off Nagle's algorithm, which would hold each
    # reply back by 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OverflowError:
        listener.close()
        raise ValueError(f"--port {port} must be between 0 and 65535") from None
    except OSError as error:
        listener.close()
        reason = f"--host {host} --port {port}: {error.strerror or error}"
        raise OSError(f"{reason}; give another address or port") from None
    return listener


class Server(uvicorn.Server):
    """A server that calls `announce` when it answers requests, and whose clients are told of
    answers that FINISHING_SECONDS after a signal are not written to their end."""

    def __init__(
        self, config: uvicorn.Config, engine: Engine, announce: Callable[[], object] | None = None
    ):
        super().__init__(config)
        self._engine, self._announce = engine, announce
        self.interrupted = False  # by SIGINT

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Lets the signal end the server."""
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the engine, which compiles kernels and captures graphs, before it announces.

        Raises the error that the engine has met.
        """
        await run_in_threadpool(self._engine.start)  # of the application's start uvicorn prints all
        await super().startup(sockets)
        if self.started and self._announce is not None:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for requests that are being answered, and ends those that take too long."""
        loop = asyncio.get_running_loop()
        close = loop.call_later(FINISHING_SECONDS, loop.run_in_executor, None, self._engine.close)
        await super().shutdown(sockets)
        close.cancel()


def make_server(
    service: Service,
    key: str | None = None,
    local: bool = True,
    announce: Callable[[], object] | None = None,
) -> Server:
    """Returns the server of a service; `key` and `local` as of `make_app`."""
    config = uvicorn.Config(
        make_app(service, key, local),
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FINISHING_SECONDS + 2,  # for the last event of those
    )
    return Server(config, service.engine, announce)


def run(
    service: Service,
    listener: socket.socket,
    key: str | None,
    local: bool,
    announce: Callable[[], object],
) -> None:
    """Answers requests, from `announce` on, until SIGTERM, after which running ones have
    FINISHING_SECONDS.

    Raises KeyboardInterrupt after SIGINT.
    """
    server = make_server(service, key, local, announce)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    # uvicorn raises the signal that has ended it once more
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server.run([listener])
        if server.interrupted:  # which asyncio can lose where uvicorn raises it once more
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.setswitchinterval(interval)
