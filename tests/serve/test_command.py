"""`tigon serve` as a process: how it begins and how it ends."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.serve import loop
from tests.serve.server import TEXT, chunks
from tigon.cli import main
from tigon.cli.serve import CPU_ROWS, GPU_ROWS, load_adapters
from tigon.models import CausalLM, from_pretrained
from tigon.serve import Engine
from tigon.serve.app import Service
from tigon.serve.batch import DecodeBatch
from tigon.serve.run import listen, make_server
from tigon.tokenizer import Tokenizer


@contextmanager
def started(
    directory: Path, *options: str, **variables: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address and process, once it is ready."""
    command = [sys.executable, "-m", "tigon", "serve", str(directory), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **variables},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"{directory.name} at http://127.0.0.1:"), line
        rows = GPU_ROWS if torch.cuda.is_available() else CPU_ROWS
        assert line.endswith(f": {rows} rows of 256 tokens\n")
        yield line.split()[2].rstrip(":"), process
    finally:
        process.kill()
        process.wait()


def test_a_signal_lets_running_requests_end(directory: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(directory)  # requests have the name that was given
    with started(link, TIGON_API_KEY="sesame") as (url, process):
        assert httpx.get(url + "/v1/models", timeout=60).status_code == 401
        headers = {"authorization": "Bearer sesame"}
        body = {"prompt": [5], "max_tokens": 100, "stream": True, "temperature": 1.0, "top_k": 0}
        body |= {"seed": 1}
        # A GPU's kernels are compiled before the first token
        given = {"json": body, "headers": headers, "timeout": 60}
        with httpx.stream("POST", url + TEXT, **given) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            found = list(chunks(lines))
        assert found[-1]["choices"][0]["finish_reason"]
        assert process.wait(60) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_the_first_line_says_that_requests_are_answered(
    model: CausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine, which compiles kernels and captures graphs as it starts, is ready by then."""
    order, start = [], Engine.start

    def start_slowly(engine: Engine) -> None:
        if "started" not in order:
            time.sleep(0.3)
            start(engine)
            order.append("started")

    monkeypatch.setattr(Engine, "start", start_slowly)
    service = Service(Engine(model, 2, 2), tokenizer, "tiny", (0,))
    with listen("127.0.0.1", 0) as listener:
        server = make_server(service, announce=lambda: order.append("ready"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:  # it waits where it is not answered at once
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            order.append(httpx.get(url + "/v1/models", timeout=60).status_code)
        finally:
            server.should_exit = True
            thread.join()
    assert order == ["started", "ready", 200]


def test_a_server_warms_up_by_all_that_requests_may_ask(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, forward = [], type(model).forward

    def noted(self: CausalLM, ids: torch.Tensor, **options: Any) -> Any:
        read.append((ids.shape[1], options.get("cu_seq_lens") is not None))
        return forward(self, ids, **options)

    monkeypatch.setattr(type(model), "forward", noted)
    batch = DecodeBatch(model, 3, 256)
    with torch.inference_mode():
        batch.warm_up(None)
    assert {(255, False), (3 * 255, True), (16, False), (16, True), (1, False)} <= {*read}
    assert not batch._cache.lengths.any()


@pytest.mark.slow
def test_requests_name_adapters(directory: Path, adapters: dict[str, Path]) -> None:
    options = [f"--adapter={name}={place}" for name, place in adapters.items()]
    with started(directory, *options) as (url, _):
        models = httpx.get(url + "/v1/models").json()["data"]
        assert [each["id"] for each in models] == [directory.name, "one", "two"]
        texts = set()
        for each in models:
            body = {"model": each["id"], "prompt": "the model", "max_tokens": 12}
            reply = httpx.post(url + TEXT, json=body, timeout=60).json()
            texts.add(reply["choices"][0]["text"])
        assert len(texts) == 3


def test_adapters_that_cannot_be_served(
    directory: Path, adapters: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    place = adapters["one"]
    for options, message in (
        ([f"a={place}", f"a={place}"], "names must differ, also from the model's, tiny"),
        ([f"tiny={place}"], "names must differ, also from the model's, tiny"),
        (["a=/nowhere"], "no directory /nowhere"),
        ([f"a={directory}"], "has no file adapter_config.json: it holds no adapter"),
    ):
        more = [f"--adapter={option}" for option in options]
        assert main(["serve", str(directory), "--port", "0", *more]) == 1
        said = capfd.readouterr().err
        assert message in said and said.count("\n") == 1


def test_a_run_stands_for_its_adapter(
    directory: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    model = from_pretrained(directory)
    shutil.copytree(adapters["one"], tmp_path / "adapter")
    (tmp_path / "config.yaml").touch()
    load_adapters(model, {"mine": str(tmp_path)})
    assert model.adapter_names == ["mine"]


@pytest.mark.slow
def test_an_interrupt(directory: Path) -> None:
    with started(directory, "--name", directory.name) as (_, process):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_taken_port(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(directory), "--port", port]) == 1
    assert capfd.readouterr().err == (
        f"tigon serve: --host 127.0.0.1 --port {port}: Address already in use; give another "
        "address or port\n"
    )


@pytest.mark.parametrize(("host", "key"), [("0.0.0.0", " "), ("127.0.0.1", "\t\n")])
def test_a_blank_key(host, key, directory, capfd, monkeypatch) -> None:
    """It would be one that no client can send."""
    monkeypatch.setenv("TIGON_API_KEY", key)
    assert main(["serve", str(directory), "--host", host, "--port", "0"]) == 1
    assert "TIGON_API_KEY is blank: set it to a key, or leave it out" in capfd.readouterr().err


def test_sockets_send_at_once() -> None:
    """Without this a reply would wait for the acknowledgement of its head, for 40 ms."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
    with listen("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


@pytest.mark.slow
def test_clients_of_every_kind_for_a_while(capfd: pytest.CaptureFixture[str]) -> None:
    """A longer run, which also bounds memory, is `python -m tests.serve.loop --seconds 3600`."""
    assert loop.main(["--seconds", "6"]) == 0
    counts = json.loads(capfd.readouterr().out.partition("\n{\n")[2].join(["{", ""]))["requests"]
    kinds = {"read 200", "stream 200", "stream left", "refuse 400", "refuse 413", "crowd 429"}
    assert kinds <= counts.keys()


def test_a_start_without_memory_is_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(engine: Engine) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(Engine, "start", start)
    assert main(["serve", str(directory), "--port", "0", "--max-rows", "3"]) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err == (
        "tigon serve: --max-rows 3: out of memory while kernels are compiled: give fewer rows\n"
    )
