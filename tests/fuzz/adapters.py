"""adapter_config.json and adapter_model.safetensors."""

import functools
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.config import SIZES
from tests.fuzz.harness import Case, Files, Target
from tests.fuzz.junk import altered, damaged, dump, texts, values
from tests.fuzz.weights import header
from tigon.models import MODELS, CausalLM, LoraConfig
from tigon.models.adapters.peft_files import CONFIG, KNOWN, WEIGHTS

PATTERNS = ["q_proj", "(.+)+x", ".*.*.*.*", "(", "[", "a" * 10**5, "\\", "q_proj|v_proj", "(?R)"]


def new_model() -> CausalLM:
    return MODELS["llama"].from_config(SIZES | {"tie_word_embeddings": False})


cached_model = functools.cache(new_model)


def example(folder: Path) -> None:
    model = new_model()
    model.add_adapter(LoraConfig(rank=2, targets=("q_proj", "v_proj"), modules_to_save="lm_head"))
    model.save_adapter(folder / "a")
    for name in (CONFIG, WEIGHTS):
        (folder / "a" / name).rename(folder / name)
    (folder / "a").rmdir()


def load(folder: Path) -> None:
    """Load an adapter: the model is unchanged afterwards, whatever the files are."""
    base = cached_model()
    before = [name for name, _ in base.named_parameters()]
    try:
        base.load_adapter(folder)
        base.delete_adapter("default")
    finally:
        assert not base.adapters
        assert [name for name, _ in base.named_parameters()] == before


patterns = st.dictionaries(
    st.one_of(st.sampled_from(PATTERNS), texts(8)),
    st.one_of(st.integers(-1, 4), st.sampled_from([2**70, 0.5]), values),
    max_size=3,
)


@st.composite
def cases(draw: Any, files: Files) -> Case:
    case: dict[str, Any] = {}
    if draw(st.integers(0, 2)):
        content = json.loads(files[CONFIG])
        for _ in range(draw(st.integers(0, 3))):
            key = draw(st.one_of(st.sampled_from(sorted(KNOWN)), texts(8)))
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
