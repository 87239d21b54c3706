"""TigonLM: lm-evaluation-harness asks a model of Tigon, under the name "tigon".

    lm_eval.simple_evaluate(model=TigonLM(model, tokenizer), tasks=["arc_easy"])
    python -m tigon.integrations.lm_eval run --model tigon --model_args pretrained=DIRECTORY ...

Text is treated as lm-eval's `hf` does. A context that several answers share is read once, and
batches are counted in tokens.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

# Before the name "tigon" is registered: with any entry in its registry lm-eval lists no others
try:
    import lm_eval.models  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("tasks need lm-eval: pip install 'tigon[eval]'") from error
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from tigon.eval.likelihood import gathers_weights, log_likelihoods
from tigon.integrations.ranks import ALONE, DataRanks, equal_passes, evaluation_mode
from tigon.layers import StateSpec, StaticCache
from tigon.models import CausalLM, from_pretrained
from tigon.tokenizer import Tokenizer
from tigon.utils.json import quote
from tigon.utils.memory import total_memory

# With batch_size="auto": tokens of a pass, and of prompts and answers written at once. On a GPU
# more, as long as their keys and values are at most this share of its memory
TOKENS, TOKENS_SHARE, MOST_TOKENS = 8192, 1 / 32, 32768
CACHED_TOKENS, CACHED_SHARE, MOST_ROWS = 32768, 1 / 8, 256

Pair = tuple[list[int], list[int]]  # tokens of a context and of its continuation
EncodedRequest = tuple[tuple[str, str] | None, list[int], list[int]]


class Prompt(NamedTuple):
    """A request to generate: its place among all, its text and tokens, and what it asks for."""

    place: int
    text: str
    ids: list[int]
    gen_kwargs: dict[str, Any]  # as the task has them


@register_model("tigon")
class TigonLM(TemplateLM):
    """A model of Tigon as lm-eval calls models: likelihoods of answers and of texts, and answers.

    `pretrained` is a directory or hub repository, or a model, of which nothing changes: it is in
    training mode again after each call, if it was before. `tokenizer` is another directory, a
    tigon.Tokenizer or one of transformers; a model in memory needs it. `dtype` and `device` are of
    a model that is loaded. `batch_size`: "auto" counts tokens and tries nothing out; a number is
    the rows, of the longest request, that a batch may be as large as. `max_gen_toks` limits answers
    of tasks that set no limit.

    On several ranks (torchrun, or a model whose weights FSDP shards) each answers a part of the
    requests, and all return all results. Raises ValueError for what the model cannot answer.
    """

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | CausalLM,
        tokenizer: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | None = None,
        batch_size: int | str = "auto",
        max_gen_toks: int = 256,
        *,
        revision: str | None = None,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        ranks: DataRanks | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, str | os.PathLike):
            self.ranks = ranks or DataRanks.launched()
            self.model = _load(os.fspath(pretrained), revision, dtype, device)
            tokenizer = os.fspath(pretrained) if tokenizer is None else tokenizer
            self._check_model(tokenizer)
        else:
            self.model = getattr(pretrained, "native", pretrained)  # of a wrapper for transformers
            self._check_model(tokenizer)
            # Ranks of tigon.parallel.from_pretrained make the same calls, others have requests of
            # their own
            sharded = gathers_weights(self.model) and not self.model.communication_groups
            shares_work = sharded and dist.is_initialized()
            self.ranks = ranks or (DataRanks.of_all() if shares_work else ALONE)
        if isinstance(tokenizer, str | os.PathLike):
            tokenizer = Tokenizer.from_pretrained(tokenizer, revision=revision)
        self.tokenizer = tokenizer
        self._device = self.model.device
        self._encoded: dict[str, list[int]] = {}  # of the texts of a call
        self.rows = _parse_batch_size(batch_size, max_batch_size)
        self.max_gen_toks = max_gen_toks
        self.add_bos_token, self._prefix_token_id = add_bos_token, prefix_token_id
        self.max_length = max_length or self.model.config.max_position_embeddings

    def _check_model(self, tokenizer: Any) -> None:
        """Raises for a model that predicts no next token, or without a tokenizer."""
        if not isinstance(self.model, CausalLM):
            raise TypeError(
                f"pretrained is a {type(self.model).__name__}: give a directory, a hub repository "
                "or a model of Tigon"
            )
        if self.model.config.labels or not self.model.causal:
            raise ValueError(f"this {type(self.model).__name__} predicts no next token")
        if tokenizer is None:
            raise ValueError("a model in memory needs its tokenizer: give tokenizer=")

    # Text and tokens, as in lm-eval's hf

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context: bos, or eos without one."""
        choices = (self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token = next((i for i in choices if i is not None), None)
        if token is None:
            raise ValueError("the tokenizer has neither bos nor eos: give prefix_token_id=")
        return token

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of prompts tells tokenizers and their chat templates apart by."""
        if isinstance(self.tokenizer, Tokenizer):
            return f"tigon-{self.tokenizer.digest()[:16]}"
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the tokens of a text, with bos if the tokenizer adds it and the text has none."""
        if add_special_tokens is None and string in self._encoded:
            return self._encoded[string]
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self._prefix):
            add = False
        return self.tokenizer.encode(string, **({} if add is None else {"add_special_tokens": add}))

    @property
    def _prefix(self) -> str:
        """The text of `prefix_token_id`."""
        return self.tokenizer.decode([self.prefix_token_id])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a conversation, without a system turn that has no place."""
        options: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return self.tokenizer.apply_chat_template(chat_history, **options)
        except Exception:  # transformers' tokenizers raise jinja2's errors
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return self.tokenizer.apply_chat_template(others, **options)

    # Likelihoods

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Returns for each (context, continuation) the log-likelihood of the continuation in nats,
        and whether greedy decoding gives it."""
        pairs = [request.args for request in requests if request.args[0]]
        texts = [context.rstrip() for context, _ in pairs] + [c + t for c, t in pairs]
        self._encoded = self._encode_at_once(dict.fromkeys(texts))
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._encoded = {}

    def _encode_at_once(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Returns what `tok_encode` does, by text; Tigon's tokenizer encodes them in parallel, and
        a context once for all its answers."""
        if not isinstance(self.tokenizer, Tokenizer):
            return {}
        plain = [text for text in texts if not has_bos_prefix(text, self._prefix)]
        add = True if self.add_bos_token is None else self.add_bos_token
        encoded = self.tokenizer.encode_batch(plain, add_special_tokens=add)
        return dict(zip(plain, encoded, strict=True))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Returns the log-likelihood of each text in nats: of all its tokens, each in the first
        window of `max_length` tokens that predicts it."""
        texts = [request.args[0] for request in requests]
        windows: list[Pair] = []
        owners: list[int] = []
        for i, text in enumerate(texts):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += map(make_disjoint_window, pairs)
            owners += [i] * (len(windows) - len(owners))
        totals = [0.0] * len(texts)
        for i, (logprob, _) in zip(owners, self._score(windows), strict=True):
            totals[i] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def _loglikelihood_tokens(
        self, requests: list[EncodedRequest], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores encoded requests, cut from the left where they are longer than the model reads."""
        pairs = []
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"the answer {quote((texts or ('', ''))[1])} has {len(continuation)} tokens: "
                    f"the model scores 1 to {self.max_length}"
                )
            room = self.max_length + 1 - len(continuation)
            pairs.append(((context or [self.prefix_token_id])[-room:], continuation))
        answers = self._score(pairs)
        for (texts, *_), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, and whether it is greedy; each rank
        computes those of some contexts."""
        longest = max((len(c) + len(t) - 1 for c, t in pairs), default=1)
        if self.rows is None:
            tokens = min(MOST_TOKENS, self._fit_tokens(TOKENS_SHARE, TOKENS))
        else:
            tokens = self.rows * longest
        costs: dict[tuple[int, ...], int] = {}  # of a context with all its continuations
        for context, continuation in pairs:
            key = tuple(context)
            costs[key] = costs.get(key, len(context)) + len(continuation)
        contexts = self.ranks.choose(costs)
        places = [i for i, (context, _) in enumerate(pairs) if tuple(context) in contexts]

        def score() -> dict[int, tuple[float, bool]]:
            scored = [pairs[i] for i in places]
            scores = log_likelihoods(self.model, scored, tokens_per_batch=tokens)
            return {i: (s.logprob, s.greedy) for i, s in zip(places, scores, strict=True)}

        return self._on_all_ranks(score, len(pairs))

    def _fit_tokens(self, share: float, least: int) -> int:
        """Returns the tokens whose keys and values take a share of the GPU's memory, or `least`."""
        if self._device.type != "cuda":
            return least
        make, dtype = self.model.model.make_states, self.model.compute_dtype or self.model.dtype
        token_bytes = StaticCache(make, StateSpec(1, 1024, dtype, "meta")).nbytes / 1024
        return max(least, int(share * total_memory(self._device) / token_bytes))

    def _on_all_ranks(self, answer: Any, count: int) -> list[Any]:
        """Returns the `count` results that the ranks have by place, in order."""
        with evaluation_mode(self.model), equal_passes(self.model, self.ranks):
            share = answer()
        results: dict[int, Any] = {}
        for part in self.ranks.gather(share):
            results |= part
        return [results[i] for i in range(count)]

    # Answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answer to each (context, gen_kwargs), up to its stop texts."""
        prompts = [self._read_prompt(i, *request.args) for i, request in enumerate(requests)]
        costs = {prompt.place: len(prompt.ids) for prompt in prompts}
        places = self.ranks.choose(costs)
        by_settings: dict[str, list[Prompt]] = {}
        for prompt in sorted(prompts, key=lambda p: -len(p.ids)):
            if prompt.place in places:
                by_settings.setdefault(repr(prompt.gen_kwargs), []).append(prompt)
        silent = True if disable_tqdm or self.ranks.rank else None  # None: without a terminal
        bar = tqdm(total=len(places), unit="answer", disable=silent)

        def answer() -> dict[int, str]:
            answers: dict[int, str] = {}
            for group in by_settings.values():
                for batch in self._batches(group):
                    answers |= self._generate(batch)
                    bar.update(len(batch))
            return answers

        with bar:
            texts = self._on_all_ranks(answer, len(prompts))
        for prompt, text in zip(prompts, texts, strict=True):
            self.cache_hook.add_partial("generate_until", (prompt.text, prompt.gen_kwargs), text)
        return texts

    def _read_prompt(self, place: int, text: str, gen_kwargs: dict[str, Any]) -> Prompt:
        """Encodes a prompt, cut from the left so that its answer has room."""
        limit = self._limit(gen_kwargs)
        room = self.max_length - limit
        if room < 1:
            raise ValueError(
                f"max_gen_toks={limit} leaves no room for a prompt: the model reads "
                f"{self.max_length} tokens"
            )
        has_bos = has_bos_prefix(text, self.tokenizer.bos_token)
        ids = self.tok_encode(text, add_special_tokens=False if has_bos else self.add_bos_token)
        return Prompt(place, text, (ids or [self.prefix_token_id])[-room:], gen_kwargs)

    def _limit(self, gen_kwargs: dict[str, Any]) -> int:
        """Returns the most tokens of an answer."""
        return normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)["max_gen_toks"]

    def _batches(self, prompts: Sequence[Prompt]) -> Iterable[Sequence[Prompt]]:
        """Yields prompts, longest first, in batches of `rows`, or of as many tokens as fit."""
        begin, tokens = 0, self._fit_tokens(CACHED_SHARE, CACHED_TOKENS)
        while begin < len(prompts):
            longest = len(prompts[begin].ids) + self._limit(prompts[begin].gen_kwargs)
            rows = self.rows or max(1, min(MOST_ROWS, tokens // longest))
            yield prompts[begin : begin + rows]
            begin += rows

    def _generate(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Returns the answers to a batch of prompts that ask for the same, by their places."""
        options: dict[str, Any] = dict(
            normalize_gen_kwargs(prompts[0].gen_kwargs, self.max_gen_toks)
        )
        eos = self.tokenizer.decode([self.eot_token_id]) if self.eot_token_id is not None else None
        until = handle_stop_sequences(options.pop("until"), eos=eos)
        limit = options.pop("max_gen_toks")
        if not options["do_sample"]:
            options.pop("temperature", None)
        if gathers_weights(self.model):  # a step at a time, as ranks run equal numbers of them
            options["cache_implementation"] = "dynamic"
        # What fills short answers is skipped, or comes after a text that ends them
        fill = (self.tokenizer.pad_token_id, self.eot_token_id, 0)
        options["pad_token_id"] = next(token for token in fill if token is not None)
        rows = [torch.tensor(prompt.ids, device="cpu") for prompt in prompts]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids, mask = pad(rows), pad([torch.ones_like(row) for row in rows])
        sequences = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=limit,
            num_return_sequences=1,
            stop_strings=[text for text in until if text],
            tokenizer=self.tokenizer,
            **options,
        )
        answers = {}
        for prompt, row in zip(prompts, sequences[:, ids.shape[1] :].tolist(), strict=True):
            text = self.tokenizer.decode(row, skip_special_tokens=True)
            answers[prompt.place] = postprocess_generated_text(text, until, None)
        return answers


def _load(
    path: str, revision: str | None, dtype: str | torch.dtype, device: str | None
) -> CausalLM:
    """Loads a model on this rank's device; on the CPU where a GPU is asked for and there is none,
    as lm-eval's command line does by default."""
    wants_gpu = device is None or device.startswith("cuda")
    if wants_gpu and torch.cuda.is_available():
        if dist.is_initialized() or device in (None, "cuda"):
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    elif wants_gpu:
        if device is not None:
            text = f"device={device}: torch sees no CUDA device here, so the model is on the CPU"
            warnings.warn(text, stacklevel=3)
        device = "cpu"
    return from_pretrained(path, revision=revision, dtype=dtype, device=device or "cpu")


def _parse_batch_size(batch_size: int | str, most: int | None) -> int | None:
    """Returns the rows of a batch; None for "auto", or "auto:N" as lm-eval writes it."""
    if str(batch_size).partition(":")[0] == "auto":
        return None if most is None else int(most)
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise ValueError(f"batch_size={batch_size!r} is neither auto nor a number above 0")
    return int(batch_size)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
