"""adapter_config.json and adapter_model.safetensors."""

import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.junk import altered, damaged, dump, values
from tests.fuzz.target import Case, Files, Target
from tests.fuzz.weights import header
from tigon.models import MODELS, CausalLM, LoraConfig
from tigon.models.adapters.peft_files import CONFIG, KNOWN, WEIGHTS

SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
PATTERNS = ["q_proj", "(.+)+x", ".*.*.*.*", "(", "[", "a" * 10**5, "\\", "q_proj|v_proj", "(?R)"]


@functools.cache
def model() -> CausalLM:
    return MODELS["llama"].from_config(SIZES)


def example(folder: Path) -> None:
    own = MODELS["llama"].from_config(SIZES)
    own.add_adapter(LoraConfig(rank=2, targets=("q_proj", "v_proj"), modules_to_save="lm_head"))
    own.save_adapter(folder / "a")
    for name in (CONFIG, WEIGHTS):
        (folder / "a" / name).rename(folder / name)
    (folder / "a").rmdir()


def load(folder: Path) -> None:
    """The model is as it was, whatever the files are."""
    base = model()
    before = [name for name, _ in base.named_parameters()]
    try:
        base.load_adapter(folder)
        base.delete_adapter("default")
    finally:
        assert not base.adapters
        assert [name for name, _ in base.named_parameters()] == before


patterns = st.dictionaries(
    st.one_of(st.sampled_from(PATTERNS), st.text(max_size=8)),
    st.one_of(st.integers(-1, 4), st.sampled_from([2**70, 0.5]), values),
    max_size=3,
)


@st.composite
def cases(draw: Any, files: Files) -> Case:
    case: dict[str, Any] = {}
    if draw(st.integers(0, 2)):
        content = json.loads(files[CONFIG])
        for _ in range(draw(st.integers(0, 3))):
            key = draw(st.one_of(st.sampled_from(sorted(KNOWN)), st.text(max_size=8)))
            content[key] = draw(st.one_of(values, patterns, st.sampled_from([2, 2**70, -1, True])))
        if draw(st.integers(0, 3)) == 0:
            content = draw(altered(content, ["r", "rank_pattern", "modules_to_save"]))
        case[CONFIG] = dump(content)
        if draw(st.integers(0, 4)) == 0:
            case[CONFIG] = draw(damaged(case[CONFIG]))
    if draw(st.integers(0, 1)):
        case[WEIGHTS] = draw(st.one_of(header(files[WEIGHTS]), damaged(files[WEIGHTS]), st.none()))
    return case


TARGETS = [Target("adapter", 2, example, cases, load)]
