"""The server: OpenAI's paths over HTTP on Starlette."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tigon.serve.answer import Answer, TokenTexts
from tigon.serve.engine import Engine, QueueFullError
from tigon.serve.guard import Guard
from tigon.serve.protocol import (
    ChatRequest,
    EngineRequest,
    Request,
    RequestError,
    TextRequest,
    choice_settings,
    make_engine_request,
    read_request,
)
from tigon.serve.replies import Reply, error_body, event
from tigon.tokenizer import Tokenizer
from tigon.utils.json import parse_object, quote

MAX_BODY = 10**6  # bytes of a request
BODY_SECONDS = 30  # in which all of it must have come
READER_SECONDS = 60  # for which a stream waits for a reader that takes nothing
PAGE_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
METRICS = (
    ("answers_running", "gauge", "answers that are being written"),
    ("answers_waiting", "gauge", "answers that wait for a row"),
    ("rows", "gauge", "answers that can be written at once"),
    ("answers_total", "counter", "answers that were written to their end"),
    ("failures_total", "counter", "answers that ended by an error of the server"),
    ("refused_total", "counter", "requests that were refused"),
    ("prompt_tokens_total", "counter", "tokens of prompts that were read"),
    ("generated_tokens_total", "counter", "tokens that were written"),
    ("steps_total", "counter", "decoding steps"),
    ("first_token_seconds_sum", "counter", "seconds from requests to their first tokens"),
    ("first_token_seconds_count", "counter", "answers with a first token"),
)


def refusal(error: RequestError) -> JSONResponse:
    """Returns the response that says why a request is refused."""
    retry = {"retry-after": "1"} if error.status == 429 else {}
    return JSONResponse(error_body(error), error.status, retry)


async def read_body(request: HTTPRequest) -> bytes:
    """Returns the body of a request; raises RequestError if it is too large, slow or cut off."""
    too_large = RequestError(f"a request has at most {MAX_BODY} bytes", status=413)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise too_large
    except TimeoutError:
        slow = f"the request did not come within {BODY_SECONDS} seconds"
        raise RequestError(slow, status=408) from None
    except ClientDisconnect:
        raise RequestError("the request was cut off") from None
    return bytes(body)


class Completion:
    """Sends a reply until the client goes away, or reads nothing for READER_SECONDS."""

    def __init__(self, reply: Reply, wake: asyncio.Event):
        self.reply, self.answers, self.wake = reply, reply.answers, wake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the reply, or as much as the client stays for."""

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), READER_SECONDS)

        try:
            if self.reply.request.stream:
                stream = StreamingResponse(self._stream(), headers=STREAM_HEADERS)
                with contextlib.suppress(TimeoutError, ClientDisconnect):
                    await stream(scope, receive, send_in_time)
            elif (response := await self._complete(receive)) is not None:
                await response(scope, receive, send)
        finally:
            for answer in self.answers:
                answer.cancel()

    async def _complete(self, receive: Receive) -> Response | None:
        """Returns the reply once all answers are whole; None if the client goes away before."""
        leaving = asyncio.create_task(_wait_for_end(receive))
        leaving.add_done_callback(lambda _: self.wake.set())
        try:
            while not all(answer.ended for answer in self.answers):
                await self.wake.wait()
                self.wake.clear()
                if leaving.done():
                    return None
        finally:
            leaving.cancel()
        pieces = [answer.take() for answer in self.answers]
        for piece in pieces:
            if piece.error:
                return refusal(RequestError(piece.error, status=500))
        return JSONResponse(self.reply.completion(pieces))

    async def _stream(self) -> AsyncIterator[bytes]:
        """Yields what is written as it comes."""
        yield b"".join(map(event, self.reply.opening()))
        unfinished = set(range(len(self.answers)))
        while unfinished:
            await self.wake.wait()
            self.wake.clear()
            events: list[bytes] = []
            for choice in sorted(unfinished):
                piece = self.answers[choice].take()
                if piece.error:
                    failed = event(error_body(RequestError(piece.error, status=500)))
                    yield b"".join([*events, failed])
                    return
                if piece.last:
                    unfinished.remove(choice)
                if piece.text or piece.scored or piece.last:
                    events += map(event, self.reply.chunks(choice, piece))
            if events:
                yield b"".join(events)
        yield b"".join([*map(event, self.reply.closing()), b"data: [DONE]\n\n"])


async def _wait_for_end(receive: Receive) -> None:
    """Waits for a client to go away."""
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass
class Service:
    """What answers the paths of a server."""

    engine: Engine
    tokenizer: Tokenizer
    name: str  # of the model, in requests
    ends: Sequence[int]  # tokens that end an answer
    adapters: Sequence[str] = ()  # of the model, that requests can name in its place
    created: int = field(default_factory=lambda: int(time.time()))
    refused: int = 0

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.tokenizer)
        self.names: dict[str, str | None] = {name: name for name in self.adapters}
        # Of a model that is an adapter and its base
        self.names[self.name] = self.engine.model.active_adapter

    async def page(self, request: HTTPRequest) -> Response:
        """Answers with the chat page."""
        page = files("tigon.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"content-security-policy": PAGE_POLICY})

    async def health(self, request: HTTPRequest) -> Response:
        """Answers whether the engine runs, and how much there is to do."""
        alive = self.engine.alive
        status = {"status": "ok" if alive else "failed"}
        load = {"running": self.engine.running, "waiting": self.engine.waiting}
        return JSONResponse(status | load, 200 if alive else 503)

    async def metrics(self, request: HTTPRequest) -> Response:
        """Answers with counters in Prometheus' text format."""
        engine = self.engine
        counts = vars(engine.counts)
        values = {f"{name}_total": n for name, n in counts.items()}
        values |= {"refused_total": self.refused, "rows": engine.max_rows}
        values |= {"answers_running": engine.running, "answers_waiting": engine.waiting}
        values["first_token_seconds_sum"] = counts["first_token_seconds"]
        values["first_token_seconds_count"] = counts["first_tokens"]
        lines = [
            f"# HELP tigon_{name} {text}\n# TYPE tigon_{name} {kind}\ntigon_{name} {values[name]}\n"
            for name, kind, text in METRICS
        ]
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    def check_name(self, name: str) -> None:
        """Raises RequestError for the name of a model that this server does not have."""
        if name not in self.names:
            names = ", ".join(map(quote, self.names))
            message = f"the model {quote(name)} does not exist; this server has {names}"
            raise RequestError(message, "model", status=404, code="model_not_found")

    def describe_model(self, name: str) -> dict[str, Any]:
        """Returns what /v1/models says of the model or an adapter."""
        known = {"id": name, "object": "model", "created": self.created, "owned_by": "tigon"}
        parent = {} if name == self.name else {"parent": self.name}
        return known | {"max_model_len": self.engine.capacity} | parent

    async def models(self, request: HTTPRequest) -> Response:
        """Answers with the list of models: this one and its adapters."""
        known = [self.describe_model(name) for name in (self.name, *self.adapters)]
        return JSONResponse({"object": "list", "data": known})

    async def one_model(self, request: HTTPRequest) -> Response:
        """Answers what the model is, under its name."""
        name = request.path_params["name"]
        self.check_name(name)
        return JSONResponse(self.describe_model(name))

    async def complete(self, kind: type[Request], request: HTTPRequest) -> Completion:
        """Answers messages or prompts."""
        body = await read_body(request)
        # Tokenizing takes its time
        engine_request = await run_in_threadpool(self._make_engine_request, kind, body)
        fields, name = engine_request.request, engine_request.request.model or self.name
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wake.set)

        answers = [
            Answer(
                prompt,
                choice_settings(engine_request.settings, i),
                most,
                self.tokenizer,
                adapter=self.names[name],
                texts=None if fields.top is None else self.texts,
                top=fields.top or 0,
                streams=fields.stream,
                notify=notify,
            )
            for prompt, most in zip(engine_request.prompts, engine_request.max_tokens, strict=True)
            for i in range(fields.n)
        ]
        try:
            self.engine.submit(answers)
        except QueueFullError as error:
            raise RequestError(str(error), status=429, code="rate_limit_exceeded") from None
        return Completion(Reply(fields, name, answers), wake)

    def _make_engine_request(self, kind: type[Request], body: bytes) -> EngineRequest:
        """Returns what the body of a request asks for; raises RequestError for a bad one."""
        try:
            values = parse_object(body, "the request")
        except ValueError as error:
            raise RequestError(str(error)) from None
        request = read_request(kind, values)
        self.check_name(request.model or self.name)
        engine = self.engine
        engine_request = make_engine_request(
            request, engine.model, self.tokenizer, self.ends, engine.capacity
        )
        count, most = len(engine_request.prompts) * request.n, engine.max_rows + engine.max_queue
        if count > most:
            raise RequestError(f"n={request.n}: {count} answers, and at most {most} can wait", "n")
        return engine_request


def make_app(service: Service, key: str | None, local: bool) -> Starlette:
    """Returns the application; with a `key` it needs it, and a `local` one answers only requests to
    this machine's own names."""

    async def refuse(request: HTTPRequest, error: Exception) -> Response:
        service.refused += 1
        if isinstance(error, HTTPException):
            path = f"{request.method} {quote(request.url.path)}"
            error = RequestError(f"{path}: {error.detail}", status=error.status_code)
        if isinstance(error, RequestError):
            return refusal(error)
        failure = refusal(RequestError("the server failed; its log says why", status=500))
        failure.headers["connection"] = "close"  # as uvicorn does after an exception
        return failure

    def refuse_early(error: RequestError) -> Response:
        service.refused += 1
        return refusal(error)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await run_in_threadpool(service.engine.start)
        yield
        await run_in_threadpool(service.engine.close)

    chat, text = (partial(service.complete, kind) for kind in (ChatRequest, TextRequest))
    routes = [
        Route("/", service.page),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.one_model),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", text, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, refuse=refuse_early, key=key, local=local)],
        exception_handlers={kind: refuse for kind in (RequestError, HTTPException, Exception)},
        lifespan=lifespan,
    )
