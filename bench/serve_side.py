"""The clients of bench/serve.py: a job on standard input, what they note on standard output.

Plain sockets, as a client library would take longer than the server.
"""

import asyncio
import json
import sys
import time
from typing import Any

Record = dict[str, float]


async def ask(port: int, body: dict[str, Any], start: float) -> Record:
    """When a request began, had its first text and was answered, and how many tokens it got."""
    if body["stream"]:
        body = body | {"stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    begun = time.perf_counter() - start
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
    first, received = 0.0, b""
    while part := await reader.read(1 << 16):
        received += part
        if not first and b'"text"' in received:
            first = time.perf_counter() - start
        received = received[-2000:] if body["stream"] else received
    writer.close()
    tokens = received.rpartition(b'"completion_tokens":')[2].partition(b",")[0]
    if not tokens.isdigit():
        raise RuntimeError(received[-300:].decode(errors="replace"))
    end = time.perf_counter() - start
    return {"start": begun, "first": first, "end": end, "tokens": int(tokens)}


async def main(job: dict[str, Any]) -> list[list[Record]]:
    start, groups = time.perf_counter(), []
    for i, bodies in enumerate(job["groups"]):
        if i:
            await asyncio.sleep(job["pause"])
        groups.append(asyncio.gather(*(ask(job["port"], body, start) for body in bodies)))
    return list(await asyncio.gather(*groups))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
