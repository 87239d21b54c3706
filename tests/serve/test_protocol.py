"""Requests: every field, and what is refused, with the name of the field."""

from typing import Any

import pytest

import tigon
from tests.serve.server import CHAT, TEXT, Server
from tigon.serve import protocol
from tigon.serve.protocol import ChatRequest, Request, RequestError, TextRequest, read_request
from tigon.tokenizer import Tokenizer

MESSAGE = {"role": "user", "content": "hi"}
# Field, a bad value, a part of the message
BOTH: list[tuple[str, Any, str]] = [
    ("model", 3, "model=3 is not text"),
    ("max_tokens", 0, "max_tokens=0 must be at least 1"),
    ("max_tokens", -1, "at least 1"),
    ("max_tokens", 2.5, "max_tokens=2.5 is not a whole number"),
    ("max_tokens", "3", "max_tokens='3' is not a whole number"),
    ("max_tokens", True, "max_tokens=True is not a whole number"),
    ("max_tokens", 2**70, "must be at most"),
    ("temperature", -0.1, "temperature=-0.1 must be at least 0"),
    ("temperature", "hot", "temperature='hot' is not a number"),
    ("temperature", 1e300, "must be at most"),
    ("temperature", 1e-35, "temperature=1e-35 is not above 0"),
    ("temperature", [1], "temperature=[1] is not a number"),
    ("top_p", 0, "top_p=0 must be above 0"),
    ("top_p", 1.1, "top_p=1.1 must be at most 1"),
    ("top_k", -2, "top_k=-2 must be at least -1"),
    ("min_p", -1, "min_p=-1 must be at least 0"),
    ("min_p", 2, "min_p=2 must be at most 1"),
    ("repetition_penalty", 0, "repetition_penalty=0 must be at least"),
    ("seed", 2**64, "must be at most"),
    ("seed", 1.5, "seed=1.5 is not a whole number"),
    ("stop", 3, "stop=3 is not text"),
    ("stop", ["a", 3], "is not text"),
    ("stop", [""], "stop=[''] must be up to 16 texts"),
    ("stop", ["a"] * 17, "must be up to 16 texts"),
    ("stop", "a" * 1001, "1 to 1000 characters"),
    ("n", 0, "n=0 must be at least 1"),
    ("n", 129, "n=129 must be at most 128"),
    ("stream", "yes", "stream='yes' is not true or false"),
    ("stream_options", {"include_usage": True}, "stream_options needs stream=true"),
    ("stream_options", 3, "stream_options=3 is not a group of settings"),
    ("stream_options", {"include": True}, "unknown setting 'stream_options.include'"),
    ("stream_options", {"include_usage": 1}, "is not true or false"),
    ("user", 3, "user=3 is not text"),
    ("logit_bias", {"5": 1}, "logit_bias={'5': 1} is not supported: leave it out"),
    ("presence_penalty", 0.5, "presence_penalty=0.5 is not supported"),
    ("frequency_penalty", -1, "frequency_penalty=-1 is not supported"),
    ("tools", [{"type": "function"}], "tools=[{'type': 'function'}] is not supported"),
    ("tool_choice", "required", "tool_choice='required' is not supported"),
    ("response_format", {"type": "json_object"}, "response_format={'type': 'json_object'} is not"),
    ("best_of", 2, "best_of=2 is not supported"),
    ("echo", True, "echo=True is not supported"),
    ("suffix", "x", "suffix='x' is not supported"),
    ("max_completion_tokens", 0, "max_completion_tokens=0 must be at least 1"),
    ("reasoning_effort", "low", "unknown field 'reasoning_effort', which is not supported"),
    ("temprature", 1, "unknown field 'temprature': did you mean 'temperature'?"),
    ("x" * 5000, 1, "unknown field 'xxx"),
]
CHATS: list[tuple[str, Any, str]] = [
    ("messages", [], "messages is empty"),
    ("messages", "hi", "messages='hi' is not a list"),
    ("messages", ["hi"], "messages[0]='hi' is not an object"),
    ("messages", [{"content": "hi"}], "messages[0].role=None is not one of system"),
    ("messages", [{"role": "robot", "content": "hi"}], "messages[0].role='robot' is not one of"),
    ("messages", [MESSAGE, {"role": "user"}], "messages[1].content=None is not text"),
    ("messages", [{"role": "user", "content": 3}], "messages[0].content=3 is not text"),
    ("messages", [MESSAGE | {"tool_calls": [{}]}], "messages[0] has 'tool_calls'"),
    ("messages", [MESSAGE | {"name": 3}], "messages[0].name=3 is not text"),
    (
        "messages",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "messages[0].content[0]={'type': 'image_url'",
    ),
    ("logprobs", 3, "logprobs=3 is not true or false"),
    ("top_logprobs", 3, "top_logprobs needs logprobs=true"),
    ("top_logprobs", 21, "top_logprobs=21 must be at most 20"),
    ("prompt", "hi", "unknown field 'prompt'"),
    ("chat_template_kwargs", {"thinking": 1}, "'thinking', which the chat template does not read"),
    ("chat_template_kwargs", {"messages": []}, "an object of the chat template's own variables"),
    ("chat_template_kwargs", 3, "chat_template_kwargs=3 is not"),
]
TEXTS: list[tuple[str, Any, str]] = [
    ("prompt", None, "'prompt' is missing"),
    ("prompt", [], "prompt is empty: it has no token"),
    ("prompt", "", "prompt is empty: it has no token"),
    ("prompt", [[]], "prompt is empty: it has no token"),
    ("prompt", 3, "prompt=3 is neither text nor a list of token ids"),
    ("prompt", {"a": 1}, "neither text nor a list of token ids"),
    ("prompt", [5, "a"], "neither text nor a list of token ids"),
    ("prompt", [5, 321], "prompt has 321, outside the vocabulary [0, 321)"),
    ("prompt", [-1], "prompt has -1, outside"),
    ("prompt", [5, True], "neither text nor a list of token ids"),
    ("prompt", [[5], 1.5], "prompt=1.5 is neither"),
    ("prompt", ["a"] * 129, "129 prompts: at most 128"),
    ("logprobs", 21, "logprobs=21 must be at most 20"),
    ("logprobs", True, "logprobs=True is not a whole number"),
    ("messages", [MESSAGE], "unknown field 'messages'"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_bad_field_is_named(path: str, server: Server) -> None:
    good: dict[str, Any] = {"messages": [MESSAGE]} if path == CHAT else {"prompt": "hi"}
    for field, value, part in BOTH + (CHATS if path == CHAT else TEXTS):
        status, error = server.refused(path, **good | {field: value})
        assert status == 400 and part in error["message"], (field, value, error)
        generation = "is not above 0" in part  # said by what resolves settings
        assert error["param"] == (None if generation else field[:100]), error
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 500
    status, error = server.refused(path, **good | {"model": "gpt"})
    assert (status, error["code"]) == (404, "model_not_found")
    assert server.refused(path)[1]["message"].endswith("is missing")


@pytest.mark.parametrize("kind", [ChatRequest, TextRequest])
def test_two_limits(kind: type[Request]) -> None:
    body = {kind.answers_by: [MESSAGE], "max_tokens": 3, "max_completion_tokens": 4}
    with pytest.raises(RequestError, match=r"max_tokens=3 and max_completion_tokens=4"):
        read_request(kind, body)
    read_request(kind, body | {"max_completion_tokens": 3})


NOTHING_BESIDES: dict[str, Any] = {
    "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [],
    "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
    "functions": None, "metadata": {}, "store": False, "service_tier": "auto", "stop": [],
    "modalities": ["text"], "echo": False, "best_of": 1, "suffix": None, "user": "me",
}  # fmt: skip


def test_values_that_change_nothing(server: Server) -> None:
    prompt = {"prompt": "the model", "max_completion_tokens": 7}
    alone, beside = (server.post(TEXT, **prompt | more) for more in ({}, NOTHING_BESIDES))
    assert alone["choices"] == beside["choices"] and beside["usage"]["completion_tokens"] == 7
    reply = server.post(CHAT, messages=[MESSAGE], max_tokens=3)["choices"][0]["message"]
    said = reply | {"tool_calls": [], "function_call": None, "annotations": []}
    server.post(CHAT, messages=[MESSAGE, said, MESSAGE], max_tokens=3, **NOTHING_BESIDES)


def settings(model: tigon.CausalLM, **fields: Any) -> dict[str, Any]:
    request = read_request(TextRequest, {"prompt": "a"} | fields)
    return vars(protocol.resolve(request, model, [0, 2]))


def test_sampling(model: tigon.CausalLM, monkeypatch: Any) -> None:
    """What chooses how to sample samples; what is left out comes from generation_config.json."""
    assert not settings(model)["do_sample"]
    assert not settings(model, seed=3)["do_sample"]
    assert not settings(model, temperature=0, top_p=0.5)["do_sample"]
    assert settings(model, top_p=1)["do_sample"]
    found = settings(model, temperature=2, seed=-1, top_k=-1, stop="a")
    assert found["do_sample"] and found["top_k"] == 0 and found["seed"] == -1
    assert found["stop_strings"] == ("a",) and found["eos_token_id"] == (0, 2)
    assert settings(model, temperature=2)["top_k"] == settings(model)["top_k"] == 0
    monkeypatch.setattr(model, "generation_config", {"do_sample": True, "top_p": 0.5})
    found = settings(model)
    assert found["do_sample"] and (found["top_p"], found["top_k"]) == (0.5, 0)
    file = {"do_sample": True, "temperature": 0.3, "top_k": 7, "stop_strings": ["x"]}
    monkeypatch.setattr(model, "generation_config", file)
    found = settings(model, top_k=None)
    assert found["do_sample"] and found["temperature"] == 0.3 and found["top_k"] == 7
    assert found["stop_strings"] == ("x",)
    assert not settings(model, temperature=0)["do_sample"]


def test_messages_reach_the_template(tokenizer: Tokenizer) -> None:
    """All roles, and content in parts."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "few"}]
    messages = [
        {"role": "system", "content": "reads"},
        {"role": "user", "content": parts, "name": "who"},
        {"role": "assistant", "content": "words"},
        {"role": "user", "content": ""},
    ]
    text = tokenizer.decode(protocol.encode_messages(messages, tokenizer, {}))
    assert text == (
        "<|im_start|>system\nreads<|im_end|>\n<|im_start|>user\na few<|im_end|>\n"
        "<|im_start|>assistant\nwords<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_variables_reach_the_template(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    template = "{{ 'reads' if enable_thinking else 'words' }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    body = {"messages": [MESSAGE], "chat_template_kwargs": {"enable_thinking": True}}
    request = read_request(ChatRequest, body)
    assert isinstance(request, ChatRequest) and request.chat_template_kwargs
    ids = protocol.encode_messages([MESSAGE], tokenizer, request.chat_template_kwargs)
    assert tokenizer.decode(ids) == "reads"
    assert tokenizer.decode(protocol.encode_messages([MESSAGE], tokenizer, {})) == "words"


def test_templates_may_refuse(tokenizer: Tokenizer, monkeypatch: Any) -> None:
    template = "{{ raise_exception('no system messages') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match=r"messages: .*no system messages"):
        protocol.encode_messages([MESSAGE], tokenizer, {})
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template: use /v1/completions"):
        protocol.encode_messages([MESSAGE], tokenizer, {})
