"""Rows in which answers share their prompts.

# S sequences
"""

from bisect import bisect_left, insort

import numpy as np

COPIES = 4  # keys that attention copies, for each token of a row, at most: they take memory


def fill(lengths: np.ndarray, shared: np.ndarray, seq_len: int) -> list[list[list[int]]]:
    """Rows of sequences, of which those to one prompt share it: lists of them in each row, of which
    the first one has the prompt. `lengths` int64 [S], with the prompt; `shared` int64 [S]: how many
    tokens each has in common with the one before it, 0 for the first one to a prompt.

    Prompts come by the tokens of all their sequences, the most first. These go into the fullest row
    that takes all. If there is none, the emptiest row takes as many as fit, and so on with the
    rest: kept together, those that take two thirds of a row would leave a third of it empty.
    """
    first = np.flatnonzero(shared == 0)
    totals, prompts = np.add.reduceat(lengths - shared, first), np.maximum.reduceat(shared, first)
    stops, sizes = np.append(first[1:], len(shared)), lengths.tolist()
    rows: list[list[list[int]]] = []
    spaces: list[tuple[int, int]] = []  # sorted: how many tokens a row still takes, and which it is
    for i in np.argsort(-totals, kind="stable").tolist():
        left = sorted((sizes[s], s) for s in range(first[i], stops[i]))
        prompt, total = int(prompts[i]), int(totals[i])
        while left:
            at = min(bisect_left(spaces, (total, 0)), len(spaces) - 1)
            if at < 0 or spaces[at][0] < left[0][0]:  # not even one
                at = len(spaces)
                spaces.append((seq_len, len(rows)))
                rows.append([])
            space, row = spaces.pop(at)
            taken, used = _take(left, prompt, space)
            rows[row].append(taken)
            insort(spaces, (space - used, row))
            total += prompt - used
    return rows


def _take(left: list[tuple[int, int]], prompt: int, space: int) -> tuple[list[int], int]:
    """Out of `left`, sorted lengths and whose they are, those that go into a space, the longest
    that fits first; and how many tokens they are."""
    taken: list[int] = []
    used = 0
    while left:
        again = prompt if taken else 0
        at = bisect_left(left, (space - used + again + 1, 0)) - 1
        if at < 0 or len(taken) * prompt > COPIES * (used + left[at][0] - again):
            break
        size, s = left.pop(at)
        used += size - again
        taken.append(s)
    return sorted(taken), used
