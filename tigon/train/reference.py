"""Computes log-probabilities of the data under the reference before training, and caches them.

Files are in `$TIGON_CACHE`/reference, with a number for each token of the data. Their names depend
on the data, the tokenizer, truncation, the reference's weights and its dtype.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tigon.data import Loader, MicroBatch, PackedRows, cache_root
from tigon.data.cache import disk_errors, make_directory
from tigon.data.collate import collate_rows
from tigon.data.examples import format_count
from tigon.data.mixture import Mixture, Window
from tigon.models import MODELS
from tigon.models.pretrained.load import read_config
from tigon.settings.config import Config, micro_batch_rows
from tigon.train.distributed import World
from tigon.train.model import base_digest, compute_dtype, sampled_digest
from tigon.utils.json import read_json
from tigon.utils.paths import new_file, write_text
from tigon.weights import Repository

COLUMN = "reference"  # of micro-batches: at each token, the log-probability of the next one
VERSION = 3  # of these files; those of other versions are computed again
GROUPS = 4096  # groups that are packed at a time
REDUCE_SIZE = 2**26  # numbers in one all-reduce

Pass = Callable[[MicroBatch], Tensor]  # log-probabilities [B, T] of the tokens that are learned


def attach(
    loader: Loader,
    config: Config,
    world: World,
    run: Pass,
    pack: Callable[[Window], PackedRows],
    *,
    weights: str,
    shared: bool,
    distinct: bool,
    name: str,
) -> None:
    """Adds COLUMN to the loader's micro-batches, from the cache or computed by the pass `run`.

    `pack` makes rows that truncate no sequence more than the loader does. `weights` is the digest
    of the reference. `shared` and `distinct` say whether rows have each prompt once and drop
    answers that are equal after truncation. Every rank calls this. Raises OSError if the cache
    cannot be written.
    """
    assert isinstance(loader.windows, Mixture)
    corpus = loader.windows.corpus
    settings = (
        *(config.seq_len, config.packing, config.truncate, config.max_length, shared, distinct),
        compute_dtype(config, world.device),
    )
    text = repr((VERSION, [part.key for part in corpus.parts], settings, weights))
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    path = cache_root() / "reference" / f"{key}.npy"
    found = read(path, corpus.num_tokens)
    if world.any(found is None):
        began = time.monotonic()
        values, tokens = compute_logprobs(loader, pack, micro_batch_rows(config), world, run)
        with world.raise_on_all_ranks():
            if not int(os.environ.get("LOCAL_RANK", 0)):
                store(path, values)
        found = read(path, len(values))
        found = values if found is None else found
        seconds = time.monotonic() - began
        world.log_rank0(
            f"reference: {format_count(tokens, 'token')} of {name}, computed in {seconds:.0f} s"
        )
    else:
        assert found is not None
        world.log_rank0(f"reference: log-probabilities of {name}, from {path}")
    corpus.add(COLUMN, found)


def read(path: Path, tokens: int) -> np.ndarray | None:
    """Returns fp32 [tokens], memory-mapped; None if absent, damaged or of other data."""
    try:
        description = read_json(path.with_suffix(".json"))
        values = np.load(path, mmap_mode="r")
        fits = values.shape == (tokens,) and values.dtype == np.float32
        return values if fits and zlib.crc32(values.data) == description["crc32"] else None
    except (OSError, EOFError, ValueError, LookupError, TypeError):  # EOFError: an empty file
        return None


def store(path: Path, values: np.ndarray) -> None:
    """Writes values atomically, and then their description, which is read first."""
    with disk_errors(path, values.nbytes):
        make_directory(path.parent)
        with new_file(path) as partial, partial.open("xb") as file:
            # np.save says of a full disk only how much was written
            header = np.lib.format.header_data_from_array_1_0(values)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(values.data)
        write_text(path.with_suffix(".json"), json.dumps({"crc32": zlib.crc32(values.data)}))


def compute_logprobs(
    loader: Loader,
    pack: Callable[[Window], PackedRows],
    micro_batch_size: int,
    world: World,
    run: Pass,
) -> tuple[np.ndarray, int]:
    """Returns fp32 log-probabilities of all tokens of the data, and the number of tokens in rows.

    Tokens that are not learned or not in a row have 0. Every rank makes the same number of passes.
    """
    assert isinstance(loader.windows, Mixture)
    corpus = loader.windows.corpus
    values, tokens = torch.zeros(corpus.num_tokens, device="cpu"), 0
    groups = int(corpus.first_group[-1])
    for group in range(0, groups, GROUPS):
        rows = pack(Window.from_groups(corpus, np.arange(group, min(group + GROUPS, groups))))
        tokens += int(np.diff(rows.spans).sum())
        count = -(-len(rows) // (micro_batch_size * world.data.size))
        for i in range(count):
            first = (i * world.data.size + world.data.rank) * micro_batch_size
            chosen = range(first, min(first + micro_batch_size, len(rows)))
            batch = collate_rows(corpus, [(corpus, rows, row) for row in chosen])
            found = run(batch.to(world.device)).flatten().cpu()
            places = (span for row in chosen for span in rows[row].tolist())
            for (start, stop), (a, b) in zip(places, batch.spans.tolist(), strict=True):
                values[start:stop] = found[a:b]
    for chunk in values.split(REDUCE_SIZE):
        world.all_reduce_sum(chunk)
    return values.numpy(), tokens


def model_digest(config: Config) -> str:
    """Returns a digest of the reference's config and of samples of its weights. Without a reference
    it is the initial model, perhaps quantized as the base of an adapter."""
    if not (config.reference or config.model):
        return f"{base_digest(config)} {config.param_dtype}"
    path, revision, quantize = config.reference, None, None
    if not path:
        path, revision = config.model, config.revision
        quantize = None if config.lora is None else config.lora.quantize
    model_config = read_config(Repository(path, revision=revision), MODELS)
    text = f"{model_config} {sampled_digest(path, revision)} {quantize}"
    return hashlib.sha256(text.encode()).hexdigest()
