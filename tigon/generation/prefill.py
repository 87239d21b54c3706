"""Prompts into a static cache: flat, without padding, so many tokens at a time.

# B rows, T prompt tokens, N tokens of a pack, V vocab
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tigon.generation.prompt import Prompt
from tigon.generation.protocols import Model
from tigon.layers import StaticCache


def packs(lengths: Sequence[int], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows with `max_tokens` tokens together, or of one row that has more."""
    start = tokens = 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > max_tokens:
            yield start, row
            start, tokens = row, 0
        tokens += length
    yield start, len(lengths)


def prefill(
    model: Model,
    cache: StaticCache,  # empty, of B rows
    prompt: Prompt,
    max_tokens: int,  # tokens of a forward pass
    copies: int = 1,
) -> Tensor:
    """The logits [B * copies, V] after each prompt, of which the cache then holds as many rows.

    Nothing but a prompt's last token touches the vocabulary.
    """
    lengths = prompt.lengths()
    flat = prompt.ids.flatten() if prompt.mask is None else prompt.ids[prompt.mask]
    bounds = list(itertools.accumulate(lengths, initial=0))
    logits = []
    for start, stop in packs(lengths, max_tokens):
        ids, rows = flat[bounds[start] : bounds[stop]], cache.rows(start, stop)
        even = len(set(lengths[start:stop])) == 1
        if even:
            for chunk in ids.view(stop - start, -1).split(max(max_tokens, 1), 1):
                out = model(chunk, past_key_values=rows, logits_to_keep=1)
            logits.append(out.logits[:, -1])
            continue
        ends = torch.tensor(bounds[start : stop + 1]) - bounds[start]
        out = model(
            ids[None],
            past_key_values=rows,
            cu_seq_lens=ends,
            max_length_q=max(lengths[start:stop]),
            logits_to_keep=ends[1:] - 1,
        )
        logits.append(out.logits[0])
    if copies > 1:
        cache.expand(copies)
    return torch.cat(logits).repeat_interleave(copies, 0)
