"""Weights of messages and rows in a run: its loss is the weighted mean over what is learned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tigon
from tests.small import chats
from tigon.tokenizer import Tokenizer
from tigon.train import main

WEIGHTS = [None, 0, 0.5, 2, None, 0, 3, 1]  # of the messages of the assistant, in turn


def weighted_rows() -> list[dict[str, Any]]:
    rows, weights = [], iter(WEIGHTS * 4)
    for i, messages in enumerate(chats(6)):
        said = [
            m | ({} if m["role"] == "user" or (w := next(weights)) is None else {"weight": w})
            for m in messages
        ]
        rows.append({"messages": said, **({"weight": 0.25} if i == 2 else {})})
    return rows


def expected(model: Any, tokenizer: Tokenizer, rows: list[dict[str, Any]], reduction: str) -> float:
    """The definition, one row and one turn at a time."""
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([tokenizer.apply_chat_template(row["messages"])])
        nll = F.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:], reduction="none")
        own, learned = 0.0, 0
        for i, message in enumerate(row["messages"]):
            weight = message.get("weight", 1) * row.get("weight", 1)
            if message["role"] == "assistant" and weight:
                before, after = row["messages"][:i], row["messages"][: i + 1]
                start = len(tokenizer.apply_chat_template(before, add_generation_prompt=True))
                stop = len(tokenizer.apply_chat_template(after))
                own += weight * nll[start - 1 : stop - 1].sum().item()
                learned += stop - start
        if learned:
            total += own if reduction == "token" else own / learned
            count += learned if reduction == "token" else 1
    return total / count


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_of_weighted_messages(
    workspace: Any, tmp_path: Path, reduction: str, packing: bool
) -> None:
    rows = weighted_rows()
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    more = {"loss_reduction": reduction, "packing": packing, "steps": 1, "log_every": 1}
    settings = workspace.settings("x", run_dir=tmp_path / "run", data=data, batch_size=6, **more)
    main([*settings, f"eval_data={data}", "lr=0"])
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    logged = {key: value for line in lines for key, value in json.loads(line).items()}
    model = tigon.from_pretrained(workspace.model, dtype=torch.float32)
    tokenizer = Tokenizer.from_pretrained(workspace.model)
    with torch.no_grad():
        wanted = expected(model, tokenizer, rows, reduction)
    # fp32 losses of some hundred tokens, added in another order
    assert logged["loss"] == pytest.approx(wanted, rel=1e-5)
    assert logged["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    # Weights of 1 would not pass for these
    plain = [{"messages": [{**m, "weight": 1} for m in row["messages"]]} for row in rows]
    with torch.no_grad():
        assert abs(expected(model, tokenizer, plain, reduction) - wanted) > 0.01
