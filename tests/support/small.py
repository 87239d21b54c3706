"""A tokenizer, a model and chats small enough to train in seconds, as files."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

import tigon
from tigon.models.pretrained.names import stored_buffers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = "the model reads some of these words and says a few others back to whoever asked it"
WORDS = TEXT.split()
LLAMA = {
    "model_type": "llama",
    "vocab_size": 321,  # odd, so that two ranks share it unevenly
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}


EXPERTS = LLAMA | {  # five, so that two ranks share them unevenly
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [0],
}


def write_tokenizer(directory: Path, text: str = TEXT, vocab_size: int = 300) -> Path:
    """A BPE tokenizer that has learned the words of a text."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def write_model(directory: Path, **changes: Any) -> Path:
    """A random Llama, or another model_type, with its tokenizer, in Hugging Face format."""
    torch.manual_seed(0)
    source = write_tokenizer(directory.with_name(directory.name + "-tokenizer"))
    config = {**LLAMA, **changes}
    model = tigon.models.MODELS[config["model_type"]].from_config(config)
    for buffer in stored_buffers(model).values():
        buffer.add_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(directory, tokenizer=tigon.Tokenizer.from_pretrained(source))
    return directory


def add_bos(source: Path, directory: Path) -> Path:
    """A copy of a model whose tokenizer puts <|endoftext|> before a text, and its template too."""
    shutil.copytree(source, directory)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    bos = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"bos_token": bos}
    file.write_text(json.dumps(config | {"chat_template": "{{ bos_token }}" + CHATML}))
    return directory


def chats(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of very uneven lengths, with user turns before and between the answers."""
    draw = random.Random(seed)

    def say(role: str, longest: int) -> dict[str, str]:
        words = draw.choices(WORDS, k=draw.randint(1, longest))
        return {"role": role, "content": " ".join(words)}

    return [
        [
            say(role, 8 if role == "user" else draw.choice([2, 12]))
            for _ in range(draw.choice([1, 1, 2]))
            for role in ("user", "assistant")
        ]
        for _ in range(count)
    ]


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    rows = [json.dumps({"messages": messages}) for messages in chats(count, seed)]
    path.write_text("\n".join(rows) + "\n")
    return path
