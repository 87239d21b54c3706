"""What bench/train_step.py measures: models, batches and targets, and how Tigon's side is built;
the peer's is in bench/train_peer.py.

# B rows of a step, T tokens of a row
"""

import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import tigon
from bench.attention_cases import lognormal
from bench.compare_side import GEMMA3_1B, LLAMA_1B, QWEN3_MOE, TINY, config
from bench.harness import Record
from tigon.settings.config import Config
from tigon.train import load
from tigon.train.cuda_graphs import Graphs
from tigon.train.model import add_lora, apply_model_settings
from tigon.train.optim import InBackward, build_optimizer

LLAMA_8B = config("llama", 128256, 4096, 14336, 32, 32, 8, 128, tie_word_embeddings=False)
LLAMA_8B |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
LLAMA_3B = config("llama", 128256, 3072, 8192, 28, 24, 8, 128, tie_word_embeddings=True)
LLAMA_3B |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
QWEN3_4B = config("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, tie_word_embeddings=True)
QWEN3_4B |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960}
GPT_OSS_20B = config("gpt_oss", 201088, 2880, 2880, 8, 64, 8, 64, tie_word_embeddings=False)
GPT_OSS_20B |= {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
QWEN3_5_SMALL = config("qwen3_5_text", 248320, 1024, 3584, 24, 8, 2, 256, tie_word_embeddings=True)
QWEN3_5_SMALL |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
QWEN3_5_9B = config("qwen3_5_text", 248320, 4096, 12288, 32, 16, 4, 256, tie_word_embeddings=False)
QWEN3_5_MOE = config(
    "qwen3_5_moe_text", 248320, 2048, 512, 8, 16, 2, 256, tie_word_embeddings=False
)
QWEN3_5_MOE |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
QWEN3_5_MOE |= {"num_experts": 256, "num_experts_per_tok": 8}
GEMMA4_E4B = config("gemma4_text", 262144, 2560, 10240, 42, 8, 2, 256, tie_word_embeddings=True)
GEMMA4_E4B |= {"global_head_dim": 512, "sliding_window": 512, "num_kv_shared_layers": 18}
GEMMA4_E4B |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144}
GEMMA4_E4B |= {"final_logit_softcapping": 30.0}
TINY_SHARED = {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": TINY["vocab_size"]}
MODELS: dict[str, tuple[str, str, Record]] = {  # class of Tigon; its name in Liger; config.json
    "Llama-3.2-1B": ("Llama", "llama", LLAMA_1B),
    "Llama-3.2-3B": ("Llama", "llama", LLAMA_3B),
    "Llama-3.1-8B": ("Llama", "llama", LLAMA_8B),
    "Qwen3-4B": ("Qwen3", "qwen3", QWEN3_4B),
    "Gemma3-1B": ("Gemma3", "gemma3_text", GEMMA3_1B),
    "Qwen3-30B-A3B": ("Qwen3Moe", "qwen3_moe", QWEN3_MOE | {"num_hidden_layers": 8}),
    "Qwen3.5-0.8B": ("Qwen3_5", "qwen3_5", QWEN3_5_SMALL),
    "Qwen3.5-9B": ("Qwen3_5", "qwen3_5", QWEN3_5_9B),
    "gpt-oss-20b": ("GptOss", "gpt_oss", GPT_OSS_20B),
    "Gemma4-E4B": ("Gemma4", "gemma4_text", GEMMA4_E4B),
    "Qwen3.5-35B-A3B": ("Qwen3_5Moe", "qwen3_5_moe", QWEN3_5_MOE),
}
OURS, PEER, FP8 = "tigon", "transformers + Liger", "fp8"
RAGGED_MEAN, SUPERVISED = 700, 0.4  # tokens of a chat; the share of its tokens that is learned
STD = 0.02  # of all matrices
RANDOM_VECTORS = ("self_attn.sinks", "router.bias", "linear_attn.A_log")  # neither zeros nor ones
# Where scores are not scaled, normed queries of length 1 and more would see one token each, which
# rounding chooses
RANDOM_VECTORS += ("self_attn.q_norm.weight",)
ADAM = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True)
class Case:
    """A training step, and what is to be reached beside the peer, or beside ours in bf16."""

    model: str  # of MODELS
    rows: int
    tokens: int
    speed: float  # at least so many times the other side's tokens per second
    memory: float | None = None  # at most so many times its peak
    share: float | None = None  # at least this much of the composed limit
    checkpointing: bool = False
    ragged: bool = False
    settings: tuple[str, ...] = ()  # of tigon.train, beside the common ones
    own: bool = False  # the other side is Tigon without these settings
    rank: int = 0  # of adapters of all projections, which are trained alone; 0: there are none
    quantize: bool = False  # the projections under them in NF4, doubly quantised

    @property
    def sides(self) -> tuple[str, str]:
        """The other one, and the one that is judged."""
        return (OURS, f"{OURS} {FP8}") if self.own else (PEER, OURS)

    @property
    def experts(self) -> bool:
        return "num_experts" in MODELS[self.model][2]

    @property
    def autotuned(self) -> bool:
        """Whether the peer's delta rule is FLA's, whose kernels try many configurations."""
        return self.model.startswith("Qwen3.5") and find_spec("fla") is not None


LONG = 8192
PADDING = {"labels": -100}
TINY_TOKENS = 48
PACKED, PADDED = "packed", "padded"
GRAPHS = ("cuda_graphs=true",)
IN_BACKWARD = ("optimizer_in_backward=true",)  # where gradients are alive at the peak
# Less memory where that leaves the speed that is asked for
RECOMPUTED = ("activation_checkpointing=true",)
RECOMPUTED_EXPERTS = ("activation_checkpointing=experts",)
FEWER_LOGITS = (f"logits_bytes={2**29}",)  # at a time
CASES = {
    "Llama-3.1-8B 1 x 8192": Case("Llama-3.1-8B", 1, LONG, 1.12, 0.87, 0.96),
    "Llama-3.2-1B 2 x 8192": Case("Llama-3.2-1B", 2, LONG, 1.18, 0.85, 0.95),
    "Llama-3.1-8B 2 x 8192, checkpointing": Case(
        *("Llama-3.1-8B", 2, LONG, 1.15, 0.90), checkpointing=True, settings=IN_BACKWARD
    ),
    "Qwen3-4B 2 x 8192": Case("Qwen3-4B", 2, LONG, 1.14, 0.85, 0.98),
    "Gemma3-1B 2 x 8192": Case("Gemma3-1B", 2, LONG, 2.4, 0.75, 0.98, settings=GRAPHS),
    "Llama-3.2-1B 1 x 512": Case("Llama-3.2-1B", 1, 512, 2.5, settings=GRAPHS),
    "ragged chats, Llama-3.1-8B": Case(*("Llama-3.1-8B", 1, LONG, 1.35, 0.80), ragged=True),
    "Qwen3-30B-A3B, 8 layers, 1 x 8192": Case(
        *("Qwen3-30B-A3B", 1, LONG, 1.5, 0.9), settings=IN_BACKWARD
    ),
    "Qwen3.5-0.8B 1 x 8192": Case("Qwen3.5-0.8B", 1, LONG, 1.3, 0.8),
    "Qwen3.5-9B 1 x 8192": Case("Qwen3.5-9B", 1, LONG, 1.3, 0.8, settings=IN_BACKWARD),
    "gpt-oss-20b, 8 layers, 1 x 8192": Case(
        *("gpt-oss-20b", 1, LONG, 1.3, 0.8),
        settings=(*IN_BACKWARD, *RECOMPUTED_EXPERTS, *FEWER_LOGITS),
    ),
    "Gemma4-E4B 1 x 8192": Case("Gemma4-E4B", 1, LONG, 1.3, 0.8, settings=IN_BACKWARD),
    "Qwen3.5-35B-A3B, 8 layers, 1 x 8192": Case(
        *("Qwen3.5-35B-A3B", 1, LONG, 1.3, 0.8), settings=(*IN_BACKWARD, *RECOMPUTED)
    ),
    "ragged chats, Qwen3.5-0.8B": Case(
        *("Qwen3.5-0.8B", 1, LONG, 1.3, 0.8), ragged=True, settings=GRAPHS
    ),
    "ragged chats, gpt-oss-20b, 8 layers": Case(
        *("gpt-oss-20b", 1, LONG, 1.3, 0.8),
        ragged=True,
        settings=(*IN_BACKWARD, *RECOMPUTED_EXPERTS),
    ),
    "ragged chats, Gemma4-E4B": Case(
        *("Gemma4-E4B", 1, LONG, 1.3, 0.8), ragged=True, settings=IN_BACKWARD
    ),
    "Llama-3.1-8B 2 x 4096 LoRA": Case("Llama-3.1-8B", 2, 4096, 1.55, 0.70, rank=16),
    "Llama-3.1-8B 1 x 512 LoRA": Case("Llama-3.1-8B", 1, 512, 3.5, settings=GRAPHS, rank=16),
    "Llama-3.1-8B 2 x 4096 QLoRA": Case("Llama-3.1-8B", 2, 4096, 1.5, rank=16, quantize=True),
    "Llama-3.1-8B 1 x 8192, fp8": Case(
        *("Llama-3.1-8B", 1, LONG, 1.35, 1.0), settings=(f"{FP8}=true",), own=True
    ),
    "Llama-3.1-8B 2 x 4096 LoRA, fp8": Case(
        *("Llama-3.1-8B", 2, 4096, 1.35, 1.0), settings=(f"{FP8}=true",), own=True, rank=16
    ),
}


def shape_of(case: Case, tiny: bool) -> Record:
    """What config.json says."""
    shape, sizes = MODELS[case.model][2], TINY | TINY_SHARED
    return shape | {key: sizes[key] for key in sizes if tiny and key in shape}


@dataclass(frozen=True)
class Batch:
    """The tokens of a step; `lengths` are those of the chats, of which only the ends are learned,
    or None where each row is one text."""

    ids: Tensor  # int64 [B, T]
    labels: Tensor  # int64 [B, T], -100 where nothing is learned
    lengths: tuple[int, ...] | None

    @classmethod
    def of(cls, case: Case, vocab: int, device: str, tiny: bool) -> "Batch":
        rows, tokens = case.rows, TINY_TOKENS if tiny else case.tokens
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab, (rows, tokens), generator=draw)
        if not case.ragged:
            return cls(ids.to(device), ids.to(device), None)
        lengths = lognormal(tokens, 12 if tiny else RAGGED_MEAN)
        learned = torch.cat([torch.arange(n) >= n - round(SUPERVISED * n) for n in lengths])
        labels = ids.masked_fill(~learned, -100)
        return cls(ids.to(device), labels.to(device), lengths)

    @property
    def positions(self) -> Tensor:
        """int64 [B, T], which restart with each chat."""
        assert self.lengths is not None
        each = torch.cat([torch.arange(n) for n in self.lengths])
        return each.view(self.ids.shape).to(self.ids.device)

    @property
    def bounds(self) -> Tensor:
        """int32, where the chats begin and end."""
        assert self.lengths is not None
        ends = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
        return ends.to(self.ids.device)

    def ours(self) -> dict[str, Any]:
        """Keywords of Tigon's forward; of packed rows what a trainer's batch has."""
        if self.lengths is None:
            return {"input_ids": self.ids, "labels": self.labels}
        more = {"cu_seq_lens": self.bounds, "max_length_q": max(self.lengths)}
        return {
            "input_ids": self.ids, "labels": self.labels, "position_ids": self.positions, **more
        }  # fmt: skip

    def theirs(self, rows: str) -> dict[str, Any]:
        """Keywords of transformers' forward; PACKED as its padding-free collator has them, or the
        chats as PADDED rows."""
        given = {"input_ids": self.ids, "labels": self.labels}
        if self.lengths is None:
            return given
        if rows == PADDED:
            given |= {"attention_mask": torch.ones_like(self.ids)}
            return {
                name: pad_sequence(x[0].split(self.lengths), True, PADDING.get(name, 0))
                for name, x in given.items()
            }
        given |= {"position_ids": self.positions}
        if self.ids.is_cuda:
            longest, bounds = max(self.lengths), self.bounds
            given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            given |= {"max_length_q": longest, "max_length_k": longest}
            chats = torch.arange(len(self.lengths), dtype=torch.int32, device=self.ids.device)
            # Fake tensors, which have no numbers, need the size of the result
            chats = chats.repeat_interleave(bounds.diff(), output_size=self.ids.shape[1])
            given |= {"seq_idx": chats[None]}
        return given

    @property
    def supervised(self) -> int:
        """Tokens whose logits are needed."""
        return int((self.labels != -100).sum())


@torch.no_grad()
def fill(parts: Iterable[tuple[str, Tensor]]) -> None:
    """Each matrix with numbers that its name decides, so that both sides have the same ones.

    Other vectors stay as both libraries initialise them: norms that change nothing.
    """
    named = dict(parts)
    for name, tensor in named.items():
        if is_drawn(name, tensor.shape):
            tensor.copy_(draw(name, tensor.shape, tensor.device, named))


@torch.no_grad()
def fill_ours(model: Any) -> None:
    """As `fill`, Tigon's parameters by the names and rows that transformers has, in whose models
    products are apart and experts are not."""
    layout = model.layout(stacked_experts=True)
    names = peer_names(layout)
    for name, parameter in model.named_parameters():
        for part in layout[name]:
            if is_drawn(part.name, part.shape):
                values = draw(part.name, part.shape, parameter.device, names)
                for source, target, rows in part.rows:
                    parameter[target : target + rows] = values[source : source + rows]


def is_drawn(name: str, shape: Sequence[int]) -> bool:
    """Whether this parameter is drawn: a matrix, or one of `RANDOM_VECTORS`."""
    return len(shape) > 1 or name.endswith(RANDOM_VECTORS)


def peer_names(layout: Mapping[str, Sequence[Any]]) -> set[str]:
    """The names that transformers has for what is in a model of Tigon."""
    return {part.name for parts in layout.values() for part in parts}


def draw(name: str, shape: Sequence[int], device: torch.device, names: Container[str]) -> Tensor:
    """The numbers of the matrix of this name, in a model with all these names.

    Where the head is another matrix, embeddings are five times as large as what a block adds:
    attention of random weights adds about the same to all tokens, and with smaller embeddings all
    would choose the same experts.
    """
    seed = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    empty = torch.empty(*shape, dtype=torch.bfloat16, device=device)
    untied = name.endswith("embed_tokens.weight") and "lm_head.weight" in names
    return empty.normal_(std=5 * STD**2 * shape[1] if untied else STD, generator=seed)


def settings(case: Case, side: str) -> Config:
    """Of tigon.train: bf16 parameters and bf16 states, as the peer has, and no clipping."""
    values = {"lr": ADAM["lr"], "beta1": ADAM["betas"][0], "beta2": ADAM["betas"][1]}
    values |= {
        "optimizer": "adamw_bf16",
        "param_dtype": "bfloat16",
        "max_grad_norm": 0,
        "batch_size": case.rows,
        "micro_batch_size": case.rows,
        "run_dir": "none",
        "model": "none",
    }
    values |= {"data": "none", "activation_checkpointing": str(case.checkpointing).lower()}
    if case.rank:
        values |= {"lora.rank": case.rank, "lora.alpha": 2 * case.rank}
    if case.quantize:
        values |= {"lora.quantize": "nf4"}
    given = [f"{key}={value}" for key, value in values.items()]
    return load(None, [*given, *(() if case.own and side == OURS else case.settings)])


def ours(case: Case, side: str, device: str, tiny: bool) -> tuple[Any, Any]:
    """Tigon's model and optimizer, as `tigon train` has them."""
    chosen = settings(case, side)
    made = getattr(tigon, MODELS[case.model][0]).from_config(
        shape_of(case, tiny), dtype=torch.bfloat16, device=device
    )
    if case.quantize:
        fill_ours(made)  # before 4 bits are made of it
    if case.rank:
        add_lora(made, chosen)
    fill_ours(made)
    model = apply_model_settings(made, chosen)
    if chosen.cuda_graphs is True and device != "cpu":
        Graphs(model)
    return model, build_optimizer(model, chosen)


def updates_of(case: Case, side: str, model: Any, optimizer: Any) -> InBackward | None:
    """What updates Tigon's weights in backward, where the case has it."""
    return InBackward(model, optimizer) if settings(case, side).optimizer_in_backward else None
