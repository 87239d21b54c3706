"""Perplexity of a model on text, or on the assistant's turns in conversations."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from tigon.data import ChatEncoder, Source, find_sources, read, read_texts
from tigon.data.formats import CHAT_FORMATS
from tigon.eval.likelihood import inference
from tigon.kernels.loss.logits import IGNORE_INDEX
from tigon.models import CausalLM
from tigon.tokenizer import Tokenizer

DEFAULT_CONTEXT = 1024
Document = tuple[np.ndarray, np.ndarray]  # token ids, and which of them are scored
Window = tuple[int, int, int, int]  # document, start, stop, first token that no window scored yet


class Windows(NamedTuple):
    """Tokenized documents, and the windows of them that are scored."""

    documents: list[Document]
    bounds: list[Window]  # shortest first
    bytes: int = 0  # UTF-8, of the text of the scored tokens


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of texts, with loss, accuracy and the number of scored tokens and bytes."""

    perplexity: float
    loss: float  # nats per token
    accuracy: float  # share of the tokens that the model ranks first
    tokens: int  # scored ones
    bytes: int = 0  # UTF-8, of their text without special tokens
    domains: dict[str, "Perplexity"] = field(default_factory=dict)  # of named texts, each by itself

    @property
    def bits_per_byte(self) -> float:
        """Returns the loss in bits per byte of text; NaN without text."""
        return self.loss * self.tokens / (self.bytes * math.log(2)) if self.bytes else math.nan

    @classmethod
    def join(cls, domains: Mapping[str, "Perplexity"]) -> Self:
        """Returns the perplexity of all domains together, with that of each in `domains`."""
        parts = domains.values()
        tokens = sum(part.tokens for part in parts)
        loss = sum(part.loss * part.tokens for part in parts) / tokens
        right = sum(part.accuracy * part.tokens for part in parts)
        size = sum(part.bytes for part in parts)
        total = perplexity_from_loss(loss)
        return cls(total, loss, right / tokens, tokens, size, dict(domains))


def perplexity_from_loss(loss: float) -> float:
    """Returns the perplexity of a mean loss in nats per token; infinite where exp overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def perplexity(
    model: CausalLM,
    tokenizer: Tokenizer,
    patterns: str | Sequence[str] | Mapping[str, str | Sequence[str]],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_tokens: int = 4096,
) -> Perplexity:
    """Returns exp of the mean negative log-likelihood over all scored tokens of the files, with
    loss and accuracy.

    Conversations score what the assistant says; {"text": ...} rows and .txt files score every token
    but a document's first. What is longer than `context` tokens (1024, or all that the model takes
    if that is less) is read in windows that advance by `stride` (half the context), and each token
    is scored in the first window that predicts it.

    {NAME: files, ...} are measured together, and each by itself in the result's `domains`.
    """
    if isinstance(patterns, Mapping):
        options: dict[str, Any] = {"context": context, "stride": stride}
        names = {n: find_windows(model, tokenizer, p, **options) for n, p in patterns.items()}
        parts = {n: score(model, w, batch_tokens=batch_tokens) for n, w in names.items()}
        return Perplexity.join(parts)
    windows = find_windows(model, tokenizer, patterns, context=context, stride=stride)
    return score(model, windows, batch_tokens=batch_tokens)


def find_windows(
    model: CausalLM,
    tokenizer: Tokenizer,
    patterns: str | Sequence[str],
    *,
    context: int | None = None,
    stride: int | None = None,
) -> Windows:
    """Reads and divides into windows what `perplexity` scores, without running the model."""
    limit = model.config.max_position_embeddings
    context = min(DEFAULT_CONTEXT, limit) if context is None else context
    if not 2 <= context <= limit:
        raise ValueError(f"context={context} is not in [2, {limit}], what the model takes")
    stride = context // 2 if stride is None else stride
    if not 0 < stride < context:
        raise ValueError(
            f"stride={stride} is not in [1, {context - 1}]: the first token of a window is not "
            f"predicted in it, so windows of {context} must overlap"
        )
    documents, size = read_documents(patterns, tokenizer)
    windows = _windows(documents, context, stride)
    if not windows:
        raise ValueError(f"{patterns} holds no token to score: no document has two tokens")
    return Windows(documents, windows, size)


def score(model: CausalLM, windows: Windows, *, batch_tokens: int = 4096) -> Perplexity:
    """Scores the windows in batches of about `batch_tokens` tokens; ranks that share a model all
    call this, and get the same.

    Raises ValueError for a loss that is not finite, and for context parallelism.
    """
    ranks = model.tensor_ranks
    silent = None if ranks is None or ranks.rank == 0 else True  # None: without a terminal
    nll, right, count = 0.0, 0, 0
    with inference(model), tqdm(total=len(windows.bounds), unit="window", disable=silent) as bar:
        for ids, labels in _batches(windows, batch_tokens):
            labels = labels.to(model.device)
            options = {"loss_reduction": "sum", "metrics": ("predicted_tokens",)}
            out = model(ids.to(model.device), labels=labels, **options)
            assert out.loss is not None
            targets = labels[:, 1:]
            scored = targets != IGNORE_INDEX
            predicted = out.metrics["predicted_tokens"][:, :-1]
            loss = out.loss.item()
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss of {len(ids)} of the windows is {loss}: look for nan, inf or huge "
                    "values in the weights of the model and its adapter"
                )
            nll += loss
            right += int((scored & (predicted == targets)).sum())
            count += int(scored.sum())
            bar.update(len(ids))
    total = perplexity_from_loss(nll / count)
    return Perplexity(total, nll / count, right / count, count, windows.bytes)


def read_documents(
    patterns: str | Sequence[str], tokenizer: Tokenizer
) -> tuple[list[Document], int]:
    """Reads conversations if the first row of the first file is one, else texts; returns them, and
    the bytes of the text of all tokens that are scored."""
    sources = find_sources(patterns)
    if _is_chat(sources[0]):
        chats = read(sources, ChatEncoder(tokenizer, must_end=False))
        documents = [
            (part.tokens[start:stop], part.supervised[start:stop])
            for part in chats
            for start, stop in pairwise(part.offsets)
        ]
        said = (run for ids, scored in documents for run in _runs(ids, scored))
        return documents, sum(_count_bytes(tokenizer, run) for run in said)
    texts = [text for source in sources for text in read_texts(source)]
    encoded = [np.array(ids, dtype=np.int32) for ids in tokenizer.encode_batch(texts)]
    size = sum(len(text.encode()) for text in texts)
    first = sum(_count_bytes(tokenizer, ids[:1]) for ids in encoded)  # which nothing predicts
    return [(ids, np.ones(len(ids), dtype=bool)) for ids in encoded], size - first


def _count_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """Returns the bytes of the text of tokens, without special ones."""
    return len(tokenizer.decode(ids.tolist(), skip_special_tokens=True).encode())


def _runs(ids: np.ndarray, scored: np.ndarray) -> Iterator[np.ndarray]:
    """Yields each run of tokens that are scored; nothing predicts a document's first one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], scored[1:], [False]])))
    for start, stop in edges.reshape(-1, 2) + 1:
        yield ids[start:stop]


def _is_chat(source: Source) -> bool:
    """Returns whether the first row of a source has one of the formats of conversations."""
    first = next((row for _, row in source.rows()), None)
    with suppress(ValueError):  # reading the rows reports the line
        if isinstance(first, dict):
            return source.format.detect(first, CHAT_FORMATS).kind in CHAT_FORMATS
    return False


def _windows(documents: Sequence[Document], context: int, stride: int) -> list[Window]:
    """Returns windows of `context` tokens with something to score, shortest first."""
    windows = []
    for d, (ids, supervised) in enumerate(documents):
        fresh = 1  # nothing predicts a document's first token
        for start in range(0, len(ids), stride):
            stop = min(start + context, len(ids))
            if supervised[fresh:stop].any():
                windows.append((d, start, stop, fresh))
            fresh = stop
            if stop == len(ids):
                break
    return sorted(windows, key=lambda window: window[2] - window[1])


def _batches(results: Windows, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ids and labels [B, T], longest windows first, padded on the right."""
    end = len(results.bounds)
    while end:
        _, start, stop, _ = results.bounds[end - 1]
        begin = max(0, end - max(1, batch_tokens // (stop - start)))
        rows = [_tensors(results.documents, window) for window in results.bounds[begin:end]]
        ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
        labels = [labels for _, labels in rows]
        yield ids, pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
        end = begin


def _tensors(documents: Sequence[Document], window: Window) -> tuple[Tensor, Tensor]:
    """Returns a window's token ids and labels, ignored where they are not scored."""
    d, start, stop, fresh = window
    tokens, supervised = documents[d]
    ids = torch.from_numpy(tokens[start:stop].astype(np.int64))
    labels = torch.where(torch.from_numpy(supervised[start:stop].copy()), ids, IGNORE_INDEX)
    labels[: fresh - start] = IGNORE_INDEX
    return ids, labels
