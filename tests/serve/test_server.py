"""The server over HTTP: replies, streams, clients that misbehave, and whom it refuses."""

import asyncio
import json
import random
import socket
from typing import Any

import httpx
import pytest
import torch

import tigon
from tests.serve.server import CHAT, NAME, TEXT, Server, chunks, serving, wait
from tigon.serve import app, run
from tigon.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "the model reads"}]


def offline(model: tigon.CausalLM, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
    """Greedy continuations, several prompts at a time, each up to its end or its most tokens."""
    found: list[list[int]] = []
    for i in range(0, len(prompts), 50):
        some = prompts[i : i + 50]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in some])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(most), eos_token_id=0, pad_token_id=0
        )
        found += out[:, width:].tolist()
    cut = [row[:n] for row, n in zip(found, most, strict=True)]
    return [row[: row.index(0) + 1] if 0 in row else row for row in cut]


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_200_requests_at_once(server: Server, model: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(4, 321) for _ in range(draw.randint(1, 150))] for _ in range(200)]
    most = [draw.randint(1, 40) for _ in prompts]
    streams = [draw.random() < 0.5 for _ in prompts]

    async def ask(client: httpx.AsyncClient, i: int) -> tuple[str, str, int]:
        body = {"prompt": prompts[i], "max_tokens": most[i], "stream": streams[i]}
        if not streams[i]:
            reply = (await client.post(TEXT, json=body)).json()
            (choice,) = reply["choices"]
            return choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]
        body["stream_options"] = {"include_usage": True}
        async with client.stream("POST", TEXT, json=body) as response:
            *parts, last = chunks(iter([line async for line in response.aiter_lines()]))
        choices = [part["choices"][0] for part in parts]
        text = "".join(choice["text"] for choice in choices)
        return text, choices[-1]["finish_reason"], last["usage"]["completion_tokens"]

    async def ask_all() -> list[tuple[str, str, int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=200, limits=limits) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(200)))

    expected = offline(model, prompts, most)
    found = asyncio.run(asyncio.wait_for(ask_all(), 200))
    reasons = ["stop" if ids[-1] == 0 else "length" for ids in expected]
    assert {"stop", "length"} == set(reasons)
    texts = [text_of(tokenizer, ids) for ids in expected]
    assert found == list(zip(texts, reasons, map(len, expected), strict=True))


def test_chat(server: Server, model: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert isinstance(ids, list)
    (expected,) = offline(model, [ids], [12])
    reply = server.post(CHAT, model=NAME, messages=MESSAGES, max_completion_tokens=12)
    assert reply["object"] == "chat.completion" and reply["model"] == NAME
    (choice,) = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == text_of(tokenizer, expected)
    assert reply["usage"]["prompt_tokens"] == len(ids)
    first, *middle, last = server.stream(CHAT, messages=MESSAGES, max_tokens=12)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0] | {"finish_reason": "length"} == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"
    }  # fmt: skip
    said = "".join(part["choices"][0]["delta"]["content"] for part in middle)
    assert said == text_of(tokenizer, expected)


def test_without_a_limit_the_context_is_one(server: Server) -> None:
    reply = server.post(TEXT, prompt=[5] * 200, temperature=1.0, seed=5, top_k=0)
    assert reply["usage"]["total_tokens"] == 256 or reply["choices"][0]["finish_reason"] == "stop"
    status, error = server.refused(TEXT, prompt=[5] * 200, max_tokens=57)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "200 tokens and 57 tokens of its answer: the context has 256" in error["message"]
    status, error = server.refused(CHAT, messages=[{"role": "user", "content": "é" * 400}])
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


def test_several_choices(server: Server, tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"prompt": ["the model", "a few"], "n": 2, "max_tokens": 10}
    body |= {"temperature": 1.0, "seed": 3}
    reply = server.post(TEXT, **body)
    texts = [choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    prompts = sum(len(tokenizer.encode(text)) for text in body["prompt"])
    assert reply["usage"]["prompt_tokens"] == prompts
    assert [choice["text"] for choice in server.post(TEXT, **body)["choices"]] == texts
    streamed = [""] * 4
    for chunk in server.stream(TEXT, **body):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts
    one = server.post(TEXT, **body | {"prompt": "the model", "n": 1})
    assert one["choices"][0]["text"] == texts[0]


WRITTEN = {"prompt": "the model", "max_tokens": 60, "temperature": 1.0, "seed": 9, "top_k": 0}


def written(server: Server) -> str:
    """A text with characters of several bytes and broken ones."""
    return server.post(TEXT, **WRITTEN)["choices"][0]["text"]


def test_stop_strings_never_show(server: Server) -> None:
    text, body = written(server), WRITTEN
    assert len(text) > 20
    for start in range(3, 17, 3):
        stop = text[start : start + 4]
        expected = text[: text.index(stop)]
        other = text[start + 2 : start + 7] + "never"
        for stops in (stop, [stop], [other, stop]):
            reply = server.post(TEXT, **body, stop=stops)
            assert reply["choices"][0]["text"] == expected
            assert reply["choices"][0]["finish_reason"] == "stop"
            parts = [c["choices"][0] for c in server.stream(TEXT, **body, stop=stops)]
            assert "".join(part["text"] for part in parts) == expected
            assert parts[-1]["finish_reason"] == "stop"
    # What only begins like one is written in the end
    assert server.post(TEXT, **body, stop=text[-3:] + "x")["choices"][0]["text"] == text


def test_a_special_token_can_be_a_stop(server: Server, tokenizer: Tokenizer) -> None:
    """Its text is never written, but it ends the answer."""
    special = tokenizer.backend.token_to_id("<|im_end|>")
    body = {"prompt": "the model", "max_tokens": 200, "temperature": 2.0, "top_k": 0}
    for seed in range(20):
        free = server.post(TEXT, **body, seed=seed, logprobs=0)["choices"][0]
        if "<|im_end|>" in (tokens := free["logprobs"]["tokens"]):
            stopped = server.post(TEXT, **body, seed=seed, stop="<|im_end|>")
            assert stopped["usage"]["completion_tokens"] == tokens.index("<|im_end|>") + 1
            assert stopped["choices"][0]["finish_reason"] == "stop"
            break
    else:
        raise AssertionError(f"token {special} never came")


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_logprobs_are_the_models_own(
    path: str, server: Server, model: tigon.CausalLM, tokenizer: Tokenizer
) -> None:
    """Not those after temperature and penalties."""
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    body: dict[str, Any] = {"prompt": prompt, "logprobs": 3} if path == TEXT else asked
    body |= {"max_tokens": 9, "repetition_penalty": 1.2}
    new = model.generate(torch.tensor([prompt]), max_new_tokens=9, repetition_penalty=1.2)
    with torch.no_grad():
        scores = model(new[:, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1)
    ids = new[0, len(prompt) :]
    chosen, best = scores.gather(1, ids[:, None])[:, 0], scores.topk(3)
    found = server.post(path, **body)["choices"][0]["logprobs"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in server.stream(path, **body)]
    for key in ["content"] if path == CHAT else found:
        assert [x for part in streamed if part for x in part[key]] == found[key]
    if path == CHAT:
        tokens = [entry["token"] for entry in found["content"]]
        values = [entry["logprob"] for entry in found["content"]]
        top = [[x["logprob"] for x in entry["top_logprobs"]] for entry in found["content"]]
        torch.testing.assert_close(torch.tensor(top), best.values, atol=1e-5, rtol=0)
        assert all(x["bytes"] == list(x["token"].encode()) or "\ufffd" in x["token"]
                   for x in found["content"])  # fmt: skip
    else:
        tokens, values = found["tokens"], found["token_logprobs"]
        for row, names, probs in zip(best.indices, found["top_logprobs"], best.values, strict=True):
            texts = [tokenizer.decode([i]) for i in row.tolist()]
            assert set(names) == set(texts)
            assert names[texts[2]] == pytest.approx(float(probs[2]), abs=1e-5)
        assert found["text_offset"][0] == 0 and sorted(found["text_offset"]) == found["text_offset"]
    assert tokens == [tokenizer.decode([i]) for i in ids.tolist()]
    torch.testing.assert_close(torch.tensor(values), chosen, atol=1e-5, rtol=0)


def test_readers_that_hang_up_free_their_rows(server: Server) -> None:
    for stream in (True, False):
        asked = {"prompt": [5], "max_tokens": 250, "stream": stream, "n": 40}
        asked |= {"temperature": 1.0, "top_k": 0}
        connection = server.connect(TEXT, **asked)
        wait(lambda: server.engine.running == 6 and server.engine.waiting > 10)
        steps = server.engine.counts.steps
        connection.close()
        server.idle()
        assert server.engine.counts.steps < steps + 200  # of some 1500


def test_a_slow_reader_holds_nobody_up(server: Server, monkeypatch: Any) -> None:
    """Its answers are written to their end, and wait for it; others go on meanwhile."""
    body = {"prompt": [5], "max_tokens": 200, "n": 20, "stream": True, "logprobs": 20}
    with server.connect(TEXT, **body) as slow:
        wait(lambda: server.engine.running == 6)
        assert server.post(TEXT, prompt="the", max_tokens=5)["usage"]["completion_tokens"] == 5
        server.idle()
        received = b""
        slow.settimeout(60)
        while b"[DONE]" not in received[-100:]:
            received += slow.recv(1 << 16)
    assert received.count(b'"finish_reason":"') == 20
    monkeypatch.setattr(app, "READER_SECONDS", 0.2)
    with server.connect(TEXT, **body | {"n": 60}) as slow:
        wait(lambda: server.engine.running == 6)
        server.idle()  # though 54 of them were not written yet
        slow.settimeout(60)
        while piece := slow.recv(1 << 16):
            received = piece
    assert b"[DONE]" not in received


def test_what_is_not_done_in_time_ends_by_an_error(
    model: tigon.CausalLM, tokenizer: Tokenizer, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.setattr(run, "FINISHING_SECONDS", 0.3)
    body = {"prompt": [5], "max_tokens": 200, "n": 20, "stream": True}
    with serving(model, tokenizer, rows=2, queue=30) as server:
        connection = server.connect(TEXT, **body)
        wait(lambda: server.engine.running == 2)
    with connection:  # the server has ended
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b'"message":"the server is shutting down"' in received
    assert received.endswith(b"\r\n0\r\n\r\n")  # a whole reply
    assert capfd.readouterr().err == ""


BAD_BODIES = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[]", "not a JSON object"),
    (b'{"n": NaN}', "not a finite number"),
    (b'{"prompt": "\xff"}', "not valid JSON"),
    (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
    (b'{"n": 1, "n": 2}', "names 'n' twice"),
    (b'{"n": ' + b"1" * 200 + b"}", "a number of 200 digits"),
    (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 100"),
]


def test_bad_bodies(server: Server) -> None:
    for body, message in BAD_BODIES:
        response = server.client.post(TEXT, content=body)
        error = response.json()["error"]
        assert response.status_code == 400 and message in error["message"], error
        assert error["type"] == "invalid_request_error"


def test_too_large_bodies(server: Server) -> None:
    for content in (b" " * 1_000_001, iter([b" " * 600_000] * 2)):
        response = server.client.post(TEXT, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["message"] == "a request has at most 1000000 bytes"


def test_a_body_that_does_not_come(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                           b"Content-Length: 100\r\n\r\n{")  # fmt: skip
        connection.settimeout(60)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_other_paths(server: Server) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404), ("GET", CHAT, 405), ("GET", "/v1/models/other", 404),
        ("POST", "/v1/embeddings", 404),
    ):  # fmt: skip
        response = server.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    models = server.client.get("/v1/models").json()
    assert [each["id"] for each in models["data"]] == [NAME]
    assert server.client.get(f"/v1/models/{NAME}").json() == models["data"][0]


def test_health_and_metrics(server: Server) -> None:
    server.idle()
    assert server.client.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}

    def read() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        return {k: float(v) for k, v in (x.split() for x in lines if not x.startswith("#"))}

    before = read()
    server.post(TEXT, prompt=[5, 6, 7], max_tokens=4, n=2)
    server.refused(TEXT, prompt=[])
    server.client.get("/health", headers={"host": "evil.example"})
    wait(lambda: read()["tigon_answers_total"] == before["tigon_answers_total"] + 2)
    grown = {key: value - before[key] for key, value in read().items()}
    seconds = grown.pop("tigon_first_token_seconds_sum")
    assert 0 < seconds < 10
    assert {key: value for key, value in grown.items() if value} == {
        "tigon_answers_total": 2, "tigon_prompt_tokens_total": 6, "tigon_generated_tokens_total": 8,
        "tigon_steps_total": 3, "tigon_refused_total": 2, "tigon_first_token_seconds_count": 2,
    }  # fmt: skip


def test_other_sites(server: Server) -> None:
    own = f"http://127.0.0.1:{server.port}"
    for headers, status in (
        ({}, 200),
        ({"host": f"localhost:{server.port}"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"origin": own}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": f"evil.example:{server.port}"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1@evil.example:80"}, 403),
        ({"host": "[::"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": f"http://localhost:{server.port}"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
    ):
        for path in ("/v1/models", "/health", "/"):
            response = server.client.get(path, headers=headers)
            assert response.status_code == status, (headers, path)
            if status == 403:
                assert response.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_http_1_0(stream: bool, server: Server) -> None:
    """They may have no Host, which browsers always send; the connection's end is the reply's."""
    content = json.dumps({"prompt": "the", "max_tokens": 3, "stream": stream}).encode()

    def ask(version: str, more: str = "") -> bytes:
        head = f"POST {TEXT} HTTP/{version}\r\nContent-Length: {len(content)}\r\n{more}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.settimeout(60)
            connection.sendall(head.encode() + content)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))

    head, _, body = ask("1.0").partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    if stream:
        assert b"transfer-encoding" not in head.lower()
        assert list(chunks(iter(body.decode().splitlines())))
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 3
    assert ask("1.0", "Host: evil.example\r\n").split()[1] == b"403"
    assert ask("1.0", "Origin: http://evil.example\r\n").split()[1] == b"403"
    assert ask("1.1", "Connection: close\r\n").split()[1] == b"400"


def test_a_key(model: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, rows=1, queue=1, key="sesame é", local=False) as server:
        for given, status in (
            (None, 401), ("Bearer sesame", 401), ("Bearer", 401), ("Basic sesame é", 401),
            ("Bearer sesame é", 200), ("bearer sesame é", 200),
        ):  # fmt: skip
            headers = {"host": "any.example"}
            if given is not None:
                headers["authorization"] = given
            encoded = {k: v.encode() for k, v in headers.items()}
            response = server.client.get("/v1/models", headers=encoded)
            assert response.status_code == status, given
            if status == 401:
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert server.client.post(TEXT, headers=encoded, json={}).status_code == 401
            assert server.client.get("/health", headers=encoded).status_code == 200


def test_a_full_queue(model: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, rows=1, queue=1) as server:
        busy = [server.connect(TEXT, prompt=[5], max_tokens=250, stream=True) for _ in range(2)]
        wait(lambda: server.engine.waiting == 1)
        response = server.client.post(TEXT, json={"prompt": "the"})
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        for connection in busy:
            connection.close()
        server.idle()
        status, error = server.refused(TEXT, prompt="the", n=3)
        assert status == 400 and "3 answers, and at most 2 can wait" in error["message"]


def test_adapters_have_names(adapted: tigon.CausalLM, tokenizer: Tokenizer) -> None:
    with serving(adapted, tokenizer, rows=2, queue=9, adapters=("one", "two")) as server:
        models = server.client.get("/v1/models").json()["data"]
        assert [(each["id"], each.get("parent")) for each in models] == [
            (NAME, None), ("one", NAME), ("two", NAME)
        ]  # fmt: skip
        body = {"prompt": "the model", "max_tokens": 12}
        texts = {}
        for name in (NAME, "one", "two"):
            reply = server.post(TEXT, model=name, **body)
            texts[name] = reply["choices"][0]["text"]
            assert reply["model"] == name
        assert len(set(texts.values())) == 3
        assert server.post(TEXT, **body)["choices"][0]["text"] == texts[NAME]
        status, error = server.refused(TEXT, model="three", **body)
        assert status == 404 and "this server has 'one', 'two', 'tiny'" in error["message"]


def test_a_failure_of_the_server(server: Server, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(server.engine._batch, "step", lambda *_: 1 / 0)
    status, error = server.refused(TEXT, prompt="the", max_tokens=4)
    assert (status, error["type"]) == (500, "server_error")
    body = {"prompt": "the", "max_tokens": 4, "stream": True}
    lines = server.client.post(TEXT, json=body).text.splitlines()
    assert "ZeroDivisionError" in json.loads(lines[-2].removeprefix("data: "))["error"]["message"]
    monkeypatch.undo()
    monkeypatch.setattr(app, "make_engine_request", lambda *_: 1 / 0)
    status, error = server.refused(TEXT, prompt="the")
    assert (status, error["message"]) == (500, "the server failed; its log says why")
    monkeypatch.undo()
    assert server.post(TEXT, prompt="the", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_the_page_names_no_other_address(server: Server) -> None:
    response = server.client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "://" not in response.text.replace("http://www.w3.org/2000/svg", "")
    assert "/v1/chat/completions" in response.text


def test_an_idle_connection_is_kept_longer_than_by_clients(server: Server) -> None:
    """Else a request and the end of its connection may cross."""
    kept = run.make_server(server.service).config.timeout_keep_alive
    assert kept > 2 * (httpx.Limits().keepalive_expiry or 0) > 0
