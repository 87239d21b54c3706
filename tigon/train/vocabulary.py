"""The tokens that a run adds: `new_tokens` with their rows, and those that end a turn."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from tigon.data import Loader, Mixture
from tigon.models import CausalLM
from tigon.models.config import eos_ids
from tigon.settings.config import Config
from tigon.tokenizer import Tokenizer
from tigon.utils.json import quote


class Vocabulary(NamedTuple):
    """Holds the ids of `new_tokens` in the tokenizer that has them."""

    new_ids: dict[str, int]  # of tokens that the tokenizer lacked
    present_ids: dict[str, int]  # of tokens that it had
    size: int  # rows that all ids of the tokenizer need

    def rows(self, stored: int) -> int:
        """Returns the rows of embedding and head, of which the checkpoint has `stored`."""
        return max(stored, self.size)

    def describe(self, stored: int) -> list[str]:
        """Returns lines for the user about the ids, and about rows that begin as a mean: beyond the
        checkpoint's `stored` ones, or spare ones of these."""
        lines = [
            f"{quote(token)} is in the tokenizer already, as {number}"
            for token, number in self.present_ids.items()
        ]
        if self.new_ids:
            lines.append(", ".join(f"{quote(token)} {id_}" for token, id_ in self.new_ids.items()))
        if self.size > stored:
            lines.append(
                f"embedding and head are resized from {stored} to {self.size} rows; "
                "new ones begin as the mean of the others"
            )
        if spare := [number for number in self.new_ids.values() if number < stored]:
            lines.append(
                f"{len(spare)} of the model's {stored} rows that no token had begin as "
                "the mean of all rows"
            )
        return [f"new_tokens: {line}" for line in lines]


def read_vocabulary(config: Config) -> Vocabulary | None:
    """Returns the ids that new_tokens get in the tokenizer; None without new_tokens."""
    if not config.new_tokens:
        return None
    tokenizer = read_tokenizer(config)
    before = tokenizer.backend.get_vocab()
    tokenizer.add_tokens(config.new_tokens, special_tokens=True)
    after = tokenizer.backend.get_vocab()
    ids = {token: after[token] for token in config.new_tokens}
    new = {token: number for token, number in ids.items() if token not in before}
    present = {token: number for token, number in ids.items() if token in before}
    return Vocabulary(new, present, max(after.values()) + 1)


def with_added_tokens(
    config: Config, tokenizer: Tokenizer, stored: int, loaders: Iterable[Loader]
) -> Config:
    """Returns the settings, with the data's last token as `new_tokens` if the model has no row for
    it and the tokens beyond its `stored` rows were all added to the tokenizer.

    A stream's tokens are not known yet.
    """
    if config.new_tokens:
        return config
    mixtures = [loader.windows for loader in loaders if isinstance(loader.windows, Mixture)]
    parts = [part for mixture in mixtures for part in mixture.corpus.parts]
    last = max((part.highest for part in parts), default=0)
    added = tokenizer.backend.get_added_tokens_decoder()
    beyond = {number for number in tokenizer.backend.get_vocab().values() if number >= stored}
    if last not in beyond or not beyond <= added.keys():
        return config
    return replace(config, new_tokens=(added[last].content,))


def read_tokenizer(config: Config) -> Tokenizer:
    """Returns the tokenizer of the settings, as its files have it."""
    return Tokenizer.from_pretrained(
        config.tokenizer or config.model, revision=None if config.tokenizer else config.revision
    )


def add_stop_tokens(model: CausalLM, tokenizer: Tokenizer, ends: Collection[int]) -> None:
    """Adds the tokens with which the model learns to end a turn to its eos_token_id.

    config.json and generation_config.json keep their own too. If there is only one and it is new,
    it becomes the tokenizer's eos, which other programs read, unless the chat template reads that.
    """
    generation = dict(model.generation_config)
    generated = eos_ids(model.config, generation)
    new = sorted(set(ends) - set(generated))
    if not new:
        return

    def merge(ids: list[int]) -> int | list[int]:
        merged = list(dict.fromkeys([*ids, *new]))
        return merged if len(merged) > 1 else merged[0]

    model.config = replace(model.config, eos_token_id=merge(eos_ids(model.config, {})))
    if generation:
        model.generation_config = generation | {"eos_token_id": merge(generated)}
    if len(new) == len(ends) == 1 and not tokenizer.template_reads("eos_token"):
        tokenizer.use_eos(new[0])
