"""A server under clients of every kind for a while: does it grow?

python -m tests.serve.loop --seconds 3600 [MODEL]

Starts `tigon serve` with a tiny model, or with MODEL, sends it replies to read and streams to read
slowly or to leave, bad requests and too many at once, and prints its memory, threads and open
files, and at the end how much they grew after the first tenth. Exit code 1 if that is more than
noise.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench.harness import stamp
from tests.serve.server import CHAT, TEXT
from tests.support.small import write_model

CLIENTS = 24
MOST_MIB, MOST_FILES, MOST_THREADS = 24, 8, 4  # of growth


@dataclass
class Sample:
    """What a server's process takes up."""

    seconds: float
    mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int, start: float) -> "Sample":
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return cls(
            time.monotonic() - start,
            int(status["VmRSS"].split()[0]) / 1024,
            len(os.listdir(f"/proc/{pid}/fd")),
            int(status["Threads"]),
        )


@contextmanager
def process(model: Path, *options: str) -> Iterator[tuple[str, int]]:
    """A server's address and process id."""
    command = [sys.executable, "-m", "tigon", "serve", str(model), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[2].rstrip(":"), server.pid
    finally:
        server.terminate()
        server.wait()


def body(draw: random.Random) -> dict[str, object]:
    """A random request that a server must answer."""
    words = " ".join(draw.choices(["the", "model", "reads", "é", "漢"], k=draw.randint(1, 30)))
    asked: dict[str, object] = {"max_tokens": draw.randint(1, 40), "n": draw.choice([1, 1, 1, 2])}
    if draw.random() < 0.6:
        asked |= {"temperature": draw.choice([0, 0.7, 1]), "top_p": 0.9, "seed": draw.randint(0, 9)}
    if draw.random() < 0.3:
        asked["stop"] = ["a", "the "]
    return asked | {"prompt": words}


async def read(client: httpx.AsyncClient, draw: random.Random) -> str:
    asked = body(draw)
    path = TEXT
    if draw.random() < 0.5:
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
        path = CHAT
    response = await client.post(path, json=asked)
    return str(response.status_code)


async def stream(client: httpx.AsyncClient, draw: random.Random) -> str:
    """Reads a stream, in one of four times slowly, and in another leaves it."""
    leaves, pause = draw.choice([(0, 0.0), (0, 0.0), (3, 0.0), (0, 0.02)])
    asked = body(draw) | {"stream": True, "logprobs": draw.choice([0, 5])}
    async with client.stream("POST", TEXT, json=asked) as response:
        count = 0
        async for _ in response.aiter_lines():
            count += 1
            await asyncio.sleep(pause)
            if count == leaves:
                return "left"
        return str(response.status_code)


async def refuse(client: httpx.AsyncClient, draw: random.Random) -> str:
    content = draw.choice([b"{", b'{"prompt": 3}', b'{"x": 1}', b" " * 1_100_000])
    return str((await client.post(TEXT, content=content)).status_code)


async def crowd(client: httpx.AsyncClient, draw: random.Random) -> str:
    """More than can wait."""
    asked = body(draw) | {"n": 40, "max_tokens": 3}
    return str((await client.post(TEXT, json=asked)).status_code)


KINDS: list[Callable[[httpx.AsyncClient, random.Random], Coroutine[None, None, str]]]
KINDS = [read, read, read, stream, stream, stream, refuse, crowd]


async def run(url: str, pid: int, seconds: float) -> tuple[list[Sample], Counter[str]]:
    """Samples over this time, and how many requests ended how."""
    start, found, counts = time.monotonic(), list[Sample](), Counter[str]()

    async def visit(number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            while time.monotonic() - start < seconds:
                kind = draw.choice(KINDS)
                counts[f"{kind.__name__} {await kind(client, draw)}"] += 1

    async def watch() -> None:
        while time.monotonic() - start < seconds:
            found.append(Sample.of(pid, start))
            await asyncio.sleep(seconds / 100)

    await asyncio.gather(watch(), *(visit(i) for i in range(CLIENTS)))
    await asyncio.sleep(1)
    found.append(Sample.of(pid, start))
    return found, counts


def growth(samples: list[Sample]) -> dict[str, float]:
    """The medians of the last tenth above those of the second."""
    tenth = max(len(samples) // 10, 1)
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]
    return {
        name: statistics.median(getattr(s, name) for s in late)
        - statistics.median(getattr(s, name) for s in early)
        for name in ("mib", "files", "threads")
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="default: a tiny one")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path, help="a JSON file for what was found")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_model(Path(folder, "tiny"), max_position_embeddings=256)
        with process(model, "--max-queue", "60") as (url, pid):
            samples, counts = asyncio.run(run(url, pid, options.seconds))
            health = httpx.get(url + "/health").json()
    shown = [
        {name: round(value, 1) for name, value in asdict(sample).items()}
        for sample in samples[:: max(len(samples) // 20, 1)]
    ]
    print(*shown, sep="\n")
    grown = growth(samples)
    found = {"requests": counts, "growth": grown, "health": health}
    print(json.dumps(found, indent=2))
    if options.out is not None:
        command = f"python -m tests.serve.loop --seconds {options.seconds:g}"
        record = {**stamp(None), "command": command, **found, "samples": shown}
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    bounds = {"mib": MOST_MIB, "files": MOST_FILES, "threads": MOST_THREADS}
    broken = [key for key in counts if key.split()[1].startswith("5")]
    busy = health != {"status": "ok", "running": 0, "waiting": 0}
    return int(busy or bool(broken) or any(grown[name] > most for name, most in bounds.items()))


if __name__ == "__main__":
    sys.exit(main())
