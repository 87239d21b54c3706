"""The tokens that `new_tokens` adds, and the rows that they need."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tigon.data import Loader, Mixture
from tigon.tokenizer import Tokenizer
from tigon.train.config import Config
from tigon.utils.json import quote


class Vocabulary(NamedTuple):
    """Tokens of a run."""

    new_ids: dict[str, int]  # tokens that the tokenizer lacked, and their ids
    present_ids: dict[str, int]  # those of new_tokens that it had
    size: int  # rows that all ids need

    def rows(self, stored: int) -> int:
        """Returns the rows of embedding and head, of which the checkpoint has `stored`."""
        return max(stored, self.size)

    def describe(self, stored: int) -> list[str]:
        """What the run's user is told."""
        lines = [
            f"new_tokens: {quote(token)} is in the tokenizer already, as {number}"
            for token, number in self.present_ids.items()
        ]
        if self.new_ids:
            each = ", ".join(f"{quote(token)} {number}" for token, number in self.new_ids.items())
            lines.append(f"new_tokens: {each}")
        if self.size > stored:
            lines.append(
                f"new_tokens: embedding and head are resized from {stored} to {self.size} rows; "
                "new ones begin as the mean of the others"
            )
        if spare := [number for number in self.new_ids.values() if number < stored]:
            lines.append(
                f"new_tokens: {len(spare)} of the model's {stored} rows that no token had begin as "
                "the mean of all rows"
            )
        return lines


def read_vocabulary(config: Config) -> Vocabulary | None:
    """From the tokenizer that the settings name; None without new_tokens."""
    if not config.new_tokens:
        return None
    tokenizer = read_tokenizer(config)
    before = tokenizer.backend.get_vocab()
    tokenizer.add_tokens(config.new_tokens, special_tokens=True)
    after = tokenizer.backend.get_vocab()
    ids = {token: after[token] for token in config.new_tokens}
    return Vocabulary(
        {token: number for token, number in ids.items() if token not in before},
        {token: number for token, number in ids.items() if token in before},
        max(after.values()) + 1,
    )


def with_added_tokens(
    config: Config, tokenizer: Tokenizer, stored: int, loaders: Iterable[Loader]
) -> Config:
    """The settings; with the last token of the data as `new_tokens`, if the model has no row for it
    and its `stored` rows end where the tokens begin that were added to the tokenizer.

    What a stream has is known only when it is read.
    """
    if config.new_tokens:
        return config
    windows = [loader.windows for loader in loaders]
    corpora = [mixture.corpus for mixture in windows if isinstance(mixture, Mixture)]
    last = max((part.highest for corpus in corpora for part in corpus.parts), default=0)
    added = tokenizer.backend.get_added_tokens_decoder()
    beyond = {number for number in tokenizer.backend.get_vocab().values() if number >= stored}
    if last not in beyond or not beyond <= added.keys():
        return config
    return replace(config, new_tokens=(added[last].content,))


def read_tokenizer(config: Config) -> Tokenizer:
    """The one that the settings name, as its files have it."""
    return Tokenizer.from_pretrained(
        config.tokenizer or config.model, revision=None if config.tokenizer else config.revision
    )
