"""A server in a thread of its own, and what clients say to it."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

import tigon
from tigon.serve.app import Service
from tigon.serve.engine import Engine
from tigon.serve.run import listen, make_server
from tigon.tokenizer import Tokenizer

NAME = "tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Server:
    """A running server, as its clients see it."""

    service: Service
    port: int
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def post(self, path: str, **body: Any) -> Any:
        """The body of a reply that must be one."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a reply that must be a refusal."""
        response = self.client.post(path, json=body)
        return response.status_code, response.json()["error"]

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end properly."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            return list(chunks(response.iter_lines()))

    def connect(self, path: str, **body: Any) -> socket.socket:
        """A connection that has sent a request and reads nothing of its own accord."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    def idle(self) -> None:
        """Wait until nothing is written, and fail if that takes too long."""
        wait(lambda: not self.engine.running and not self.engine.waiting)


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to its [DONE]."""
    for line in lines:
        if not line:
            continue
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            return
        yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def wait(reached: Callable[[], bool]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


@contextmanager
def serving(
    model: tigon.CausalLM,
    tokenizer: Tokenizer,
    *,
    rows: int,
    queue: int,
    ends: tuple[int, ...] = (0,),
    key: str | None = None,
    local: bool = True,
    adapters: tuple[str, ...] = (),
) -> Iterator[Server]:
    """A server that ends with the block."""
    service = Service(Engine(model, rows, queue), tokenizer, NAME, ends, adapters)
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        running = make_server(service, key, local)
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        wait(lambda: running.started)
        try:
            yield Server(service, port)
        finally:
            running.should_exit = True
            thread.join()
