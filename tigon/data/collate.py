"""Rows to tensors.

# B lines, T tokens of a line, n sequences
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tigon.data.examples import Examples, pad_columns
from tigon.data.mixture import Corpus, concat_ranges
from tigon.data.packing import PackedRows
from tigon.utils.random import as_int64, mix, random_bits

DROPOUT = int.from_bytes(b"dropout", "little")  # apart from what else is drawn of a seed


class BatchLine(NamedTuple):
    """The spans of a corpus that share one line of a batch."""

    corpus: Corpus
    spans: np.ndarray  # int64 [k, 2]
    shared: np.ndarray | None = None  # int64 [k], as PackedRows has it


@dataclass(frozen=True)
class MicroBatch:
    """Rows as tensors: what the model reads, where the sequences are, and their columns.

    Padding, behind the sequences of a line, has token 0 and columns of 0.
    """

    input_ids: Tensor  # int64 [B, T]
    # int64 [B, T]; they restart with each sequence, behind its prefix, and with the padding
    position_ids: Tensor
    attention_mask: Tensor | None  # bool [B, T], False on padding; None: there is none
    cu_seq_lens: Tensor  # int32, over the flattened batch; a line's padding is a sequence too
    longest: int  # tokens of the longest of these; attention kernels need it on the host
    spans: Tensor  # int64 [n, 2], where each sequence starts and stops in the flattened batch
    parts: Tensor  # int64 [n], which part of its corpus each sequence is of
    per_token: Mapping[str, Tensor]  # [B, T, ...] each
    per_example: Mapping[str, Tensor]  # [n, ...] each: those of each sequence's example
    sources: tuple[tuple[Examples, int], ...]  # of each sequence: whose it is, and from which token
    # int64 [n, 2], the spans on the host, where nothing waits for the device
    host_spans: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    dropout_keys: Tensor | None = None  # int64 [B, T], where something is dropped in training
    # int64 [sequences of cu_seq_lens, 2], on the host: the tokens of the flattened batch that each
    # goes on from, as `Batch.of` has it; None: no sequence does
    prefixes: np.ndarray | None = None

    @property
    def origins(self) -> tuple[str, ...]:
        """The "file:line" of each sequence."""
        return tuple(examples.location(start) for examples, start in self.sources)

    def host_column(self, column: str) -> np.ndarray:
        """The values [n] of a column per example, on the host."""
        return np.array([e.per_example[column][e.index(np.asarray(a))] for e, a in self.sources])

    def select(self, keep: np.ndarray) -> Self:
        """Gathers the sequences where `keep`, bool [n], is true into one line of a new batch.

        Without any, the line is one token of padding. No sequence may have a prefix.
        """
        assert self.prefixes is None
        starts, lengths = self.host_spans[keep, 0], np.diff(self.host_spans[keep])[:, 0]
        index_of, ends = concat_ranges(starts, lengths), np.cumsum(lengths)
        device, empty = self.input_ids.device, not len(lengths)

        def sent(values: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(values)
            pinned = tensor.pin_memory() if device.type == "cuda" else tensor
            return pinned.to(device, non_blocking=True)

        index, sequence_index = sent(index_of), sent(np.flatnonzero(keep))

        def gather(x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            return (flat.new_zeros(1, *flat.shape[1:]) if empty else flat[index])[None]

        spans = np.stack([ends - lengths, ends], axis=1)
        cu = np.array([0, 1]) if empty else np.append(0, ends)
        return replace(
            self,
            input_ids=gather(self.input_ids),
            position_ids=gather(self.position_ids),
            attention_mask=torch.zeros(1, 1, dtype=torch.bool, device=device) if empty else None,
            cu_seq_lens=sent(cu.astype(np.int32)),
            longest=int(lengths.max(initial=1)),
            spans=sent(spans),
            parts=self.parts[sequence_index],
            per_token={name: gather(column) for name, column in self.per_token.items()},
            per_example={name: column[sequence_index] for name, column in self.per_example.items()},
            sources=tuple(s for s, kept in zip(self.sources, keep, strict=True) if kept),
            host_spans=spans,
            dropout_keys=None if self.dropout_keys is None else gather(self.dropout_keys),
        )

    def with_dropout(self, seed: int, step: int, numbers: np.ndarray) -> Self:
        """Copy with dropout_keys, on the host: random bits of the seed, the step, the sequence's
        number in the step, of `numbers` [n], and the token's position in its sequence."""
        number = np.zeros(self.input_ids.numel(), dtype=np.int64)
        lengths = np.diff(self.host_spans)[:, 0]
        number[concat_ranges(self.host_spans[:, 0], lengths)] = np.repeat(numbers, lengths)
        step_seed = as_int64(mix(mix(seed ^ DROPOUT) + step))
        sequences = random_bits(step_seed, torch.from_numpy(number).view_as(self.input_ids))
        return replace(self, dropout_keys=random_bits(sequences, self.position_ids))

    def to(self, device: torch.device) -> Self:
        """Copy with all tensors on the device, without waiting for copies."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Copy with all tensors in pinned memory, from which copies to a GPU are asynchronous."""
        return self._map_tensors(Tensor.pin_memory)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of all tensors until the stream has done what it was given so far."""
        values = [getattr(self, f.name) for f in fields(self)]
        for value in values + [v for m in values if isinstance(m, Mapping) for v in m.values()]:
            if isinstance(value, Tensor):
                value.record_stream(stream)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Copy with `change` applied to every tensor, columns included."""

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: changed(column) for name, column in value.items()}
            return change(value) if isinstance(value, Tensor) else value

        return replace(self, **{f.name: changed(getattr(self, f.name)) for f in fields(self)})

    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of the model's forward that this batch gives."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "cu_seq_lens": self.cu_seq_lens,
            "max_length_q": self.longest,
            "dropout_keys": self.dropout_keys,
            "prefixes": None if self.prefixes is None else torch.from_numpy(self.prefixes),
        }


def collate_rows(columns: Corpus, rows: Sequence[tuple[Corpus, PackedRows, int]]) -> MicroBatch:
    """Collates rows, each an index of the packed rows of a corpus: if they are packed, each on a
    line of their seq_len, otherwise each sequence on a line of its own."""
    lines = [BatchLine(corpus, *packed.line(index)) for corpus, packed, index in rows]
    if rows and rows[0][1].packing:
        return collate(columns, lines, rows[0][1].seq_len)
    return collate(columns, [BatchLine(x.corpus, span[None]) for x in lines for span in x.spans])


def collate(columns: Corpus, lines: Sequence[BatchLine], length: int | None = None) -> MicroBatch:
    """Makes a batch with the spans of each line, or with a line of padding if there are no lines.

    Lines are padded to `length` tokens, by default to the longest. The batch has the columns of the
    corpus `columns`.
    """
    lines = lines or [BatchLine(columns, np.zeros((0, 2), dtype=np.int64))]
    sizes = np.concatenate([np.diff(line.spans)[:, 0] for line in lines])
    line = np.repeat(np.arange(len(lines)), [len(line.spans) for line in lines])
    used = np.bincount(line, weights=sizes, minlength=len(lines)).astype(np.int64)
    length = max(1, int(used.max())) if length is None else length
    shape, begins = (len(lines), length), np.arange(len(lines)) * length
    stops = np.cumsum(sizes) + (begins - np.cumsum(used) + used)[line]
    cu = np.unique(np.concatenate([begins, stops - sizes, begins + used, [len(lines) * length]]))
    lengths = np.diff(cu)
    prefixes = compute_prefixes(lines, np.searchsorted(cu, stops - sizes), cu)
    positions = np.arange(len(lines) * length) - np.repeat(cu[:-1], lengths)
    if prefixes is not None:
        positions += np.repeat(np.diff(prefixes)[:, 0], lengths)
    real = np.arange(length) < used[:, None]
    slices = [piece for line in lines for piece in line.corpus.slices(line.spans)]

    def place(pieces: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
        placed = np.zeros((*shape, *like.shape[1:]), like.dtype)
        if pieces:  # sequences follow each other in both: the k-th real token is the k-th of these
            placed[real] = np.concatenate(pieces)
        return placed

    per_token = {}
    for name, like in columns.columns["per_token"].items():
        pieces = [e.column("per_token", name)[a:b] for e, a, b in slices]
        *pieces, like = pad_columns(name, [*pieces, like])  # a stream's next window may be wider
        per_token[name] = place(pieces, like)
    per_example = {}
    for name, like in columns.columns["per_example"].items():
        values = [e.column("per_example", name)[e.index(np.asarray(a))] for e, a, _ in slices]
        per_example[name] = np.array(values, like.dtype).reshape(-1, *like.shape[1:])
    spans = np.stack([stops - sizes, stops], axis=1)
    tokens = place([e.tokens[a:b] for e, a, b in slices], np.zeros(0, np.int64))
    return MicroBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(positions.reshape(shape)),
        None if real.all() else torch.from_numpy(real),
        torch.from_numpy(cu.astype(np.int32)),
        int(lengths.max()),
        torch.from_numpy(spans.copy()),
        torch.from_numpy(np.concatenate([x.corpus.part_indices(x.spans) for x in lines])),
        {name: torch.from_numpy(column) for name, column in per_token.items()},
        {name: torch.from_numpy(column) for name, column in per_example.items()},
        tuple((examples, start) for examples, start, _ in slices),
        spans,
        prefixes=prefixes,
    )


def compute_prefixes(
    lines: Sequence[BatchLine], at: np.ndarray, cu: np.ndarray
) -> np.ndarray | None:
    """Computes `MicroBatch.prefixes`; `at` [n] is the index in `cu` of each span."""
    shared = np.concatenate(
        [np.zeros(len(x.spans), np.int64) if x.shared is None else x.shared for x in lines]
    )
    if not shared.any():
        return None
    first_of_prefix = np.maximum.accumulate(np.where(shared == 0, np.arange(len(shared)), 0))
    prefixes = np.zeros((len(cu) - 1, 2), dtype=np.int64)
    first = cu[at[first_of_prefix]]
    prefixes[at] = np.stack([first, first + shared], axis=1)
    return prefixes
