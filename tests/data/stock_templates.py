"""The chat templates that TRL ships, with a tokenizer that has their special tokens, and what is
learned of conversations under each."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

SPEC = find_spec("trl")
FOLDER = Path(SPEC.origin).parent / "chat_templates" if SPEC and SPEC.origin else Path()
STEMS = sorted(path.stem for path in FOLDER.glob("*.jinja")) if SPEC else []
SPECIAL = re.compile(
    r"<\|[^|<>\s{}]+\|?>|<[^|<>\s{}]+\|>|<｜[^<>\s]+?｜>|<(?:start|end)_of_[a-z]+>|<sop>|\[gMASK\]"
)


def read_template(stem: str) -> str:
    return (FOLDER / f"{stem}.jinja").read_text()


def write_tokenizer(directory: Path) -> Path:
    """One token for each byte, and one for each special token of the templates."""
    special = {token for stem in STEMS for token in SPECIAL.findall(read_template(stem))}
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *sorted(special)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"}))
    return directory


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _call(name: str, x: int) -> dict[str, Any]:
    function = {"name": name, "arguments": {"x": x}}
    return {"type": "function", "id": name * 9, "function": function}


def _result(name: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"result of {name}", "name": name, "tool_call_id": name * 9}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "q"}},
            },
        },
    }
    for name in "fg"
]
THREE = [_user("q1"), _says("a1"), _user("q2"), _says("a2"), _user("q3"), _says("a3")]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": THREE[:2],
    "two": THREE[:4],
    "three": THREE,
    "alike": [*THREE[:2], *THREE[:2]],
    "system": [{"role": "system", "content": "s0"}, *THREE[:4]],
    "last": [*THREE[:3], _says("a2", reasoning_content="r2")],
    "all": [
        THREE[0],
        _says("a1", reasoning_content="r1"),
        THREE[2],
        _says("a2", reasoning_content="r2"),
    ],
    "tags": [
        THREE[0],
        _says("<think>\nr1\n</think>\n\na1"),
        THREE[2],
        _says("<think>\nr2\n</think>\n\na2"),
    ],
    "call": [THREE[0], _says("", tool_calls=[_call("f", 1)]), _result("f"), THREE[3]],
    "text and call": [THREE[0], _says("a1", tool_calls=[_call("f", 1)]), _result("f"), THREE[3]],
    "reasoned call": [
        THREE[0],
        _says("", tool_calls=[_call("f", 1)], reasoning_content="r1"),
        *(_result("f"), THREE[3]),
    ],
    "two calls": [
        THREE[0],
        _says("", tool_calls=[_call("f", 1), _call("g", 2)]),
        *(_result("f"), _result("g"), THREE[3]),
    ],
}
# Turns of the assistant: answers, with their reasoning, or the calls
TURNS = {
    "one": ["a1"],
    "two": ["a1", "a2"],
    "three": ["a1", "a2", "a3"],
    "alike": ["a1", "a1"],
    "system": ["a1", "a2"],
    "last": ["a1", ("r2", "a2")],
    "all": [("r1", "a1"), ("r2", "a2")],
    "tags": [("r1", "a1"), ("r2", "a2")],
    "call": ["call", "a2"],
    "text and call": ["text and call", "a2"],
    "reasoned call": ["reasoned call", "a2"],
    "two calls": ["two calls", "a2"],
}
REASONING = r"\['reasoning_content'\].*writes nothing of it: use a template that writes reasoning"
NO_TOOLS = r"messages\[1\]\['tool_calls'\].*writes nothing of it: use a template that knows tools"
ALTERNATE = "roles must alternate"


@dataclass(frozen=True)
class Style:
    """What a template writes of the assistant's turns."""

    answer: str = "{}<|im_end|>\n"
    reasoned: str = ""  # answer with reasoning; "": the template writes none
    calls: Mapping[str, str] = field(default_factory=dict)  # of conversations
    errors: Mapping[str, str] = field(default_factory=dict)  # of conversations
    # Turns that are learned in the whole text, where others are written differently there
    kept: Mapping[str, list[int]] = field(default_factory=dict)
    final: str = ""  # what the last turn ends in besides
    tagged: str = ""  # answer with <think> in its content; "": as it is
    before_call: str = ""  # the reasoning "r1" in front of a call; "": the template writes none
    after_calls: str = ""  # what begins an answer to a tool's result
    marks: bool = False  # whether it has {% generation %} blocks
    parts: bool = False  # whether content is a list of parts
    untried: Sequence[str] = ()  # conversations
    opener: str = ""  # that prompts have and conversations do not

    def text(self, turn: Any, name: str) -> str:
        if isinstance(turn, tuple) and name == "tags" and not self.tagged:
            return self.answer.format("<think>\n{}\n</think>\n\n{}".format(*turn))
        if isinstance(turn, tuple):
            return (self.tagged if name == "tags" else self.reasoned).format(*turn)
        if turn == "reasoned call":
            return self.before_call + self.calls["call"]
        after = self.after_calls if "call" in name else ""
        return self.calls.get(turn) or after + self.answer.format(turn)

    def error(self, name: str) -> str | None:
        if name in self.errors:
            return self.errors[name]
        if name == "reasoned call" and not self.before_call:
            return ALTERNATE if self.errors.get("call") == ALTERNATE else REASONING
        return REASONING if name in ("last", "all") and not self.reasoned else None


def calls(one: str, text: str, two: str) -> dict[str, str]:
    return {"call": one, "text and call": text, "two calls": two}


def all_calls(error: str) -> dict[str, str]:
    return dict.fromkeys(("call", "text and call", "two calls"), error)


def _last_alone(*names: str) -> dict[str, list[int]]:
    return {name: [len(TURNS[name]) - 1] for name in names}


DIALOGS = ("two", "three", "alike", "system", "last", "all", "tags")
HERMES = [
    f'<tool_call>\n{{"name": "{n}", "arguments": {{"x": {x}}}}}\n</tool_call>'
    for n, x in (("f", 1), ("g", 2))
]
XML = [
    f"<tool_call>\n<function={n}>\n<parameter=x>\n{x}\n</parameter>\n</function>\n</tool_call>"
    for n, x in (("f", 1), ("g", 2))
]
END = "<|im_end|>\n"
HERMES_CALLS = calls(HERMES[0] + END, f"a1\n{HERMES[0]}{END}", "\n".join(HERMES) + END)
XML_CALLS = calls(XML[0] + END, f"a1\n\n{XML[0]}{END}", "\n".join(XML) + END)
NEMOTRON_CALLS = calls(f"{XML[0]}\n{END}", f"a1\n{XML[0]}\n{END}", "\n".join(XML) + f"\n{END}")
LFM_CALLS = calls(
    f"<|tool_call_start|>[f(x=1)]<|tool_call_end|>{END}",
    f"a1<|tool_call_start|>[f(x=1)]<|tool_call_end|>{END}",
    f"<|tool_call_start|>[f(x=1), g(x=2)]<|tool_call_end|>{END}",
)
LFM_THINKS = Style(
    reasoned="<think>{}</think>{}<|im_end|>\n",
    calls=LFM_CALLS,
    kept=_last_alone("all", "tags"),
    tagged="<think>\n{}\n</think>\n\n{}<|im_end|>\n",
    marks=True,
    before_call="<think>r1</think>",
)
CHANNEL = "<|channel>thought\n{}\n<channel|>{}<turn|>\n"
GEMMA_CALL = "<|tool_call>call:f{x:1}<tool_call|>"
GEMMA_TWO = GEMMA_CALL + "<|tool_call>call:g{x:2}<tool_call|>"
GEMMA4 = Style(
    "{}<turn|>\n",
    calls=calls(
        f"{GEMMA_CALL}<|tool_response>",
        f"{GEMMA_CALL}a1<|tool_response>",
        f"{GEMMA_TWO}<|tool_response>",
    ),
    kept=_last_alone("text and call"),  # the tool's answer goes in front of the text
    before_call="<|channel>thought\nr1\n<channel|>",
)
QWEN3 = Style(
    reasoned="<think>\n{}\n</think>\n\n{}<|im_end|>\n",
    calls=HERMES_CALLS,
    kept=_last_alone(*DIALOGS, "call", "text and call", "two calls"),
    before_call="<think>\nr1\n</think>\n\n",
    tagged="<think>\n{}\n</think>\n\n{}<|im_end|>\n",
)
QWEN3_5 = Style(
    reasoned="{}\n</think>\n\n{}<|im_end|>\n",
    calls=XML_CALLS,
    kept=_last_alone(*DIALOGS),
    tagged="{}\n</think>\n\n{}<|im_end|>\n",
    before_call="r1\n</think>\n\n",
)
NO_THINKING = r"prompt for messages\[\d\].*turns reasoning off.*chat_template_kwargs"
NEMOTRON = Style(
    reasoned="{}</think>{}<|im_end|>\n",
    calls=NEMOTRON_CALLS,
    before_call="r1</think>\n",
    kept=_last_alone("all", "tags"),
    tagged="{}\n</think>\n\n{}<|im_end|>\n",
)
DEEPSEEK = Style(
    "{}<｜end▁of▁sentence｜>",
    opener="<think>\n",
    errors={
        "text and call": "writes nothing of it: use a template that knows tools",
        "tags": r"messages\[\d\]\['content'\].*writes nothing of its reasoning",
    },
    untried=("call", "reasoned call", "two calls"),  # depends on whether content is null or empty
)
DEEPSEEK_CALL = (
    "a1<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
)
PHI = Style("{}<|end|>\n", final="</s>", errors=all_calls(NO_TOOLS))
MUSE_CALLS = [
    f' to={n}<|message|><atem:function_calls>\n<atem:invoke name="{n}">\n<atem:parameter name="x">'
    f"{x}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
    for n, x in (("f", 1), ("g", 2))
]
LLAMA_CALL = '{"name": "f", "parameters": {"x": 1}}<|eot_id|>'
NO_TEXT = r"messages\[1\]\['content'\].*writes nothing of it: use a template that writes it"
LLAMA = Style(
    "{}<|eot_id|>",
    calls={"call": LLAMA_CALL},
    errors={"text and call": NO_TEXT, "two calls": "only supports single tool-calls"},
)
GPT_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
VISION = Style(" {}<end_of_utterance>\n", parts=True, untried=(*all_calls(""), "reasoned call"))
DIFFUSION = replace(
    GEMMA4,
    reasoned=CHANNEL,
    after_calls="<|turn>model\n",
    kept=_last_alone("all"),
    errors={"text and call": r"prompt for messages\[3\] is not what it writes"},
)

STYLES = {
    "cohere": Style("{}<|END_OF_TURN_TOKEN|>", errors=all_calls(ALTERNATE)),
    "cohere2": Style("{}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", errors=all_calls(ALTERNATE)),
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": replace(
        DEEPSEEK, calls={"text and call": DEEPSEEK_CALL}, errors={"tags": DEEPSEEK.errors["tags"]}
    ),
    "diffusion_gemma": DIFFUSION,
    "gemma": Style(
        "{}<end_of_turn>\n", errors=all_calls(ALTERNATE) | {"system": "System role not supported"}
    ),
    "gemma3": Style("{}<end_of_turn>\n", errors=all_calls(ALTERNATE)),
    "gemma4": GEMMA4,
    "gemma4_v2": replace(
        GEMMA4,
        calls=calls(f"{GEMMA_CALL}<turn|>\n", f"{GEMMA_CALL}a1<turn|>\n", f"{GEMMA_TWO}<turn|>\n"),
        before_call="",
        kept={},
    ),
    "gemma4_v3": GEMMA4,
    "gemma4_v4": GEMMA4,
    "gemma4_v5": replace(DIFFUSION, after_calls=""),
    "glm4moe": Style(errors=dict.fromkeys(TURNS, "would never learn to stop")),
    "gptoss": Style(
        "<|channel|>final<|message|>{}<|return|>",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
        "<|return|>",
        {
            "call": GPT_CALL,
            "text and call": f"<|channel|>analysis<|message|>a1<|end|><|start|>assistant{GPT_CALL}",
        },
        before_call="<|channel|>analysis<|message|>r1<|end|><|start|>assistant",
        kept=_last_alone(*DIALOGS),  # others end in <|end|>
        errors={"two calls": r"messages\[1\]\['tool_calls'\]\[1\].*writes nothing of it"},
    ),
    "idefics3": VISION,
    "lfm2": Style(errors=all_calls(NO_TOOLS)),
    # What is marked in the whole text is learned, without reasoning, too
    "lfm2_2_5": LFM_THINKS,
    "lfm2_2_5_v2": LFM_THINKS,
    "lfm2_2_5_vl": LFM_THINKS,
    "lfm2_v2": Style(calls=LFM_CALLS),
    "llama3": Style("{}<|eot_id|>", errors=all_calls(NO_TOOLS)),
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "llava_next": Style(" {}</s> ", parts=True, untried=(*all_calls(""), "reasoned call")),
    "muse_glimmer": Style(
        " to=user<|message|>{}<|eot|>",
        " to=self<|message|>{}<|eom|><|start|>assistant to=user<|message|>{}<|eot|>",
        {
            "call": f"{MUSE_CALLS[0]}<|eot|>",
            "two calls": "<|eom|><|start|>assistant".join(MUSE_CALLS) + "<|eot|>",
        },
        before_call=" to=self<|message|>r1<|eom|><|start|>assistant",
        errors={"text and call": NO_TEXT},
    ),
    "nemotron_3_5_lightning": NEMOTRON,
    "nemotron_3_nano": replace(
        NEMOTRON, reasoned="{}\n</think>\n{}<|im_end|>\n", before_call="r1\n</think>\n"
    ),
    "nemotron_3_super": replace(
        NEMOTRON, reasoned="{}\n</think>\n{}<|im_end|>\n", before_call="r1\n</think>\n"
    ),
    "nemotron_3_ultra": NEMOTRON,
    "phi3": PHI,
    "phi3_5": PHI,
    "qwen2_5": Style(calls=HERMES_CALLS),
    "qwen2_5_vl": Style(errors=all_calls(NO_TOOLS)),
    "qwen3": QWEN3,
    "qwen3_5_nothink": replace(
        QWEN3_5, errors=dict.fromkeys(("last", "all", "tags", "reasoned call"), NO_THINKING)
    ),
    "qwen3_5_think": QWEN3_5,
    "qwen3_6": QWEN3_5,
    "qwen3_8": replace(QWEN3_5, kept={}),
    "qwen3_instruct_2507": Style(calls=HERMES_CALLS),
    "qwen3_vl": Style(calls=HERMES_CALLS),
    "smolvlm": VISION,
}
