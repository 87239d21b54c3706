"""Runs `tigon serve`: a model behind OpenAI's protocol until a signal ends it."""

import os
from argparse import Namespace
from pathlib import Path

from tigon.cli.commands import check_sequences, end_tokens
from tigon.cli.load import load_model_and_tokenizer
from tigon.serve.app import Service
from tigon.serve.engine import Engine
from tigon.serve.guard import KEY_VARIABLE, check_address
from tigon.serve.protocol import RequestError, resolve
from tigon.serve.run import listen, run
from tigon.utils.terminal import one_line

GPU_ROWS, CPU_ROWS = 64, 8  # more would help little, and leave less room for each text


def serve(args: Namespace) -> int:
    """Loads a model and answers requests; returns 0 after SIGTERM."""
    key = os.environ.get(KEY_VARIABLE)
    local = check_address(args.host, key)
    for name, least in (("max_rows", 1), ("max_queue", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    with listen(args.host, args.port) as listener:  # first: a port may be taken
        model, tokenizer = load_model_and_tokenizer(args)
        if model.config.labels:
            raise ValueError(f"{args.model} scores sequences and cannot write any")
        check_sequences(model)
        ends = end_tokens(model, tokenizer)
        try:
            default = resolve(None, model, ends)
        except RequestError as error:
            raise ValueError(error.message) from None
        rows = args.max_rows or (GPU_ROWS if model.device.type == "cuda" else CPU_ROWS)
        engine = Engine(model, rows, args.max_queue, default)
        place = Path(args.model)
        name = args.name or (place.resolve().name if place.exists() else args.model)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(one_line(f"{name} at {url}: {rows} rows of {engine.capacity} tokens"), flush=True)
        run(Service(engine, tokenizer, name, ends), listener, key, local)
    return 0
