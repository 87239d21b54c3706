"""Models to the hub."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from tigon.hub import UploadTarget, escape_markdown, usage_section, write_card
from tigon.models._few_bits import count_parameters
from tigon.models._model import LanguageModel
from tigon.models._save import SavesItself, save_pretrained
from tigon.weights import Writers


def push_to_hub(
    model: LanguageModel,
    repo_id: str,
    *,
    tokenizer: SavesItself | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
    card: str | None = None,
    overwrite_card: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    stacked_experts: bool | None = None,
) -> str:
    """Upload what `save_pretrained` writes; returns the address of the repository, or of the pull
    request with `create_pr`.

    The repository is made if there is none: `private`, or as the account's default is (None). A
    `revision` is a branch. All files come in one commit, and what the hub has already is not sent
    again. `card` is the text of README.md; None is a short one. A card there that somebody has
    changed stays, with a warning, unless `overwrite_card`. Under a process group every rank calls
    this, and all must see rank 0's temporary directory. Raises OSError, saying what to do, if the
    hub cannot be reached or refuses: before anything is written, where that can be known.
    """
    ranks = Writers()
    with ExitStack() as stack:
        place = ""
        with ranks.together():
            if ranks.first:
                destination = UploadTarget(
                    repo_id, private=private, revision=revision, token=token, create_pr=create_pr
                )
                place = stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(ranks.gather(place)[0], "model")
        save_pretrained(
            model,
            folder,
            tokenizer=tokenizer,
            dtype=dtype,
            max_shard_size=max_shard_size,
            stacked_experts=stacked_experts,
        )
        where = ""
        with ranks.together():
            if ranks.first:
                text = _short_card(model, destination.name) if card is None else card
                where = destination.upload(
                    folder, card=text, message=commit_message, overwrite_card=overwrite_card
                )
        return ranks.gather(where)[0]


def _short_card(model: LanguageModel, repository: str) -> str:
    count = count_parameters(model)
    about = f"`{model.config.transformers_class}` with {count:,} parameters, saved by Tigon."
    paragraphs = [
        f"# {escape_markdown(repository.split('/')[-1])}",
        about,
        usage_section(repository),
    ]
    return write_card(paragraphs, tags=[model.config.model_type])
