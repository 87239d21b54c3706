"""Runs `tigon serve`: a model behind OpenAI's protocol until a signal ends it."""

import os
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch

from tigon.cli.commands import check_sequences, end_tokens
from tigon.cli.load import load_model_and_tokenizer, one_process
from tigon.models import CausalLM
from tigon.serve.app import Service
from tigon.serve.engine import Engine
from tigon.serve.guard import KEY_VARIABLE, check_address
from tigon.serve.protocol import RequestError, resolve
from tigon.serve.run import listen, run
from tigon.utils.config import check_range
from tigon.utils.terminal import one_line

MOST_ROWS = 1024
GPU_ROWS, CPU_ROWS = 64, 8  # more would help little, and leave less room for each text


def serve(args: Namespace) -> int:
    """Loads a model and answers requests; returns 0 after SIGTERM."""
    key = os.environ.get(KEY_VARIABLE)
    local = check_address(args.host, key)
    check_range("--max-rows", args.max_rows, ge=1, le=MOST_ROWS)
    check_range("--max-queue", args.max_queue, ge=0)
    with listen(args.host, args.port) as listener:  # first: a port may be taken
        model, tokenizer = load_model_and_tokenizer(args, one_process(args))
        if model.config.labels:
            raise ValueError(f"{args.model} scores sequences and cannot write any")
        check_sequences(model)
        place, adapters = Path(args.model), dict(args.adapter)
        name = args.name or (Path(os.path.abspath(place)).name if place.exists() else args.model)
        if name in adapters or len(adapters) < len(args.adapter):
            raise ValueError(f"--adapter: names must differ, also from the model's, {name}")
        load_adapters(model, adapters)
        ends = end_tokens(model, tokenizer)
        try:
            default = resolve(None, model, ends)
        except RequestError as error:
            raise ValueError(error.message) from None
        rows = args.max_rows or (GPU_ROWS if model.device.type == "cuda" else CPU_ROWS)
        engine = Engine(model, rows, args.max_queue, default)
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        ready = one_line(f"{name} at {url}: {rows} rows of {engine.capacity} tokens")
        service = Service(engine, tokenizer, name, ends, [*adapters])
        try:
            run(service, listener, key, local, partial(print, ready, flush=True))
        except torch.OutOfMemoryError:  # while it starts; later ones are answers
            raise ValueError(
                f"--max-rows {rows}: out of memory while kernels are compiled: give fewer rows"
            ) from None
    return 0


def load_adapters(model: CausalLM, adapters: dict[str, str]) -> None:
    """Loads adapters by name, for a run the one that it exported; the active one stays active.
    ValueError for one that does not fit or brings tokens of its own."""
    active, vocab = model.active_adapter, model.config.vocab_size
    for name, place in adapters.items():
        exported = Path(place, "adapter")
        of_run = Path(place, "config.yaml").is_file() and exported.is_dir()
        model.load_adapter(exported if of_run else place, name)
        if model.config.vocab_size != vocab:
            raise ValueError(
                f"--adapter {name}={place} has a vocabulary of its own: serve it alone, as "
                f"`tigon serve {place}`"
            )
    model.set_adapter(active)
