"""The curve of a run against a loop written out in plain torch, and against other ways to it."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import tigon
from tests.support.small import EXPERTS, LLAMA, write_model, write_tokenizer
from tests.train.layouts import assert_same_metrics
from tests.train.test_layouts import GROUPS
from tigon.train import load, main, prepare, start


def batch_of(tokenizer, path):
    """Every chat as (ids, labels), straight from the file."""
    for line in path.read_text().splitlines():
        ids, mask = tokenizer.encode_chat(json.loads(line)["messages"])
        ids, mask = torch.tensor(ids), torch.tensor(mask)
        yield ids, torch.where(mask, ids, -100)


def reference_loss(model, examples, reduction="token"):
    losses = [
        F.cross_entropy(model(ids[None]).logits[0, :-1].float(), labels[1:], reduction="none")
        for ids, labels in examples
    ]
    counts = [(labels[1:] != -100).sum() for _, labels in examples]
    if reduction == "token":
        return sum(loss.sum() for loss in losses) / sum(counts)
    return sum(loss.sum() / n for loss, n in zip(losses, counts, strict=True)) / len(losses)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_curve_equals_a_plain_loop(workspace, reduction):
    """Packed, in micro-batches, with warm-up, cosine, decay and clipping."""
    run, steps = f"plain-{reduction}", 5
    settings = {"batch_size": 64, "micro_batch_size": 2, "steps": steps, "warmup_steps": 2}
    settings |= {"weight_decay": 0.1, "loss_reduction": reduction, "max_grad_norm": 1.0}
    main(workspace.settings(run, eval_data=workspace.held_out, **settings))

    tokenizer = tigon.Tokenizer.from_pretrained(workspace.model)
    model = tigon.Llama.from_pretrained(workspace.model)
    examples = list(batch_of(tokenizer, workspace.data))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    for step in range(steps):
        loss = reference_loss(model, examples, reduction)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            done = max(0, step - 2) / (steps - 2)
            group["lr"] = 3e-3 * (
                [0.5, 1.0][step] if step < 2 else 0.55 + 0.45 * math.cos(math.pi * done)
            )
        optimizer.step()
        optimizer.zero_grad()
        assert workspace.metrics(run, "loss")[step] == pytest.approx(loss.item(), rel=1e-5)
        assert workspace.metrics(run, "grad_norm")[step] == pytest.approx(norm.item(), rel=1e-4)
    held_out = list(batch_of(tokenizer, workspace.held_out))
    expected = reference_loss(model, held_out, reduction).item()
    assert workspace.metrics(run, "eval_loss") == [pytest.approx(expected, rel=1e-5)]
    assert workspace.metrics(run, "eval_tokens") == [
        sum(int((labels[1:] != -100).sum()) for _, labels in held_out)
    ]


def test_bfloat16_over_float32_weights_stays_close(workspace):
    """Mixed precision runs through FSDP on one rank; weights and their updates stay float32."""
    same = {"steps": 4, "export": "true", "export_dtype": "float32"}
    main(workspace.settings("fp32", **same))
    main(workspace.settings("mixed", dtype="bfloat16", **same))
    exact = workspace.metrics("fp32", "loss")
    assert workspace.metrics("mixed", "loss") == pytest.approx(exact, rel=1e-2)
    assert workspace.metrics("mixed", "loss") != exact
    weights = tigon.from_pretrained(workspace.root / "mixed/hf").state_dict()
    start = tigon.from_pretrained(workspace.model).state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    assert weights[name].dtype == torch.float32
    assert not torch.equal(weights[name], weights[name].bfloat16().float())
    assert 0 < (weights[name] - start[name]).abs().max() < 4 * 3.1e-3


def test_pretraining_from_a_config_learns_and_exports(workspace, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(["the model reads some of these words again and again"] * 60))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA, "dtype": "bfloat16"}))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    settings = workspace.settings(
        "pretrained", task="pretrain", init=config, tokenizer=tokenizer, data=text, seq_len=64
    )
    settings = [s for s in settings if not s.startswith("model=")]
    main([*settings, "separator=\n\n", "epochs=4", "lr=1e-2", "export=true"])
    losses = workspace.metrics("pretrained", "loss")
    # The sentence is the same each time: only its first token after <|endoftext|> is not learned
    assert losses[0] == pytest.approx(math.log(LLAMA["vocab_size"]), rel=0.3)
    assert losses[-1] < 0.5 * losses[0]
    model = tigon.from_pretrained(workspace.root / "pretrained/hf")
    assert model.dtype == torch.bfloat16
    report = (workspace.root / "pretrained/report.html").read_text()
    assert f"finished · {len(losses)} steps" in report


def test_experts_are_balanced_and_their_load_is_recorded(workspace, tmp_path):
    """Each micro-batch's balance weighs as its targets do; an evaluation is of the tokens alone."""
    source = write_model(tmp_path / "experts", **EXPERTS)
    tokenizer = tigon.Tokenizer.from_pretrained(source)
    changes = {"model": source, "batch_size": 8, "micro_batch_size": 2, "steps": 2}
    changes |= {"router_aux_loss_coef": 0.5, "eval_data": workspace.held_out, "export": "true"}
    settings = workspace.settings("experts", **changes)
    with start("cpu") as world:
        run = prepare(load(None, settings), world)
    batches = [
        rows.inputs() | {"labels": rows.input_ids.masked_fill(~rows.per_token["supervised"], -100)}
        for rows in run.data.micro_batches(0)
    ]
    shares = torch.stack([run.model.num_items(**batch) for batch in batches]).double()
    shares /= shares.sum()
    assert len(batches) == 4 and len(shares.unique()) > 1
    plain = tigon.from_pretrained(source)
    names = ("aux_loss", "expert_load")
    with torch.no_grad():
        outs = [plain(**batch, metrics=names) for batch in batches]
    loss, aux_loss = (
        sum(s * value for s, value in zip(shares, values, strict=True))
        for values in ([o.loss for o in outs], [o.metrics["aux_loss"] for o in outs])
    )
    load_of_step = sum(s * o.metrics["expert_load"] for s, o in zip(shares, outs, strict=True))

    main(settings)
    assert workspace.metrics("experts", "aux_loss")[0] == pytest.approx(aux_loss.item(), rel=1e-6)
    assert workspace.metrics("experts", "expert_imbalance")[0] == pytest.approx(
        5 * load_of_step.max().item(), rel=1e-6
    )
    expected = loss + 0.5 * aux_loss
    assert workspace.metrics("experts", "loss")[0] == pytest.approx(expected.item(), rel=1e-6)
    trained = tigon.from_pretrained(workspace.root / "experts/hf")
    assert trained.config.output_router_logits and trained.config.router_aux_loss_coef == 0.5
    evaluated = reference_loss(trained, list(batch_of(tokenizer, workspace.held_out)))
    assert workspace.metrics("experts", "eval_loss")[-1] == pytest.approx(
        evaluated.item(), rel=1e-5
    )


@pytest.mark.slow
def test_packed_experts_see_the_same_tokens(workspace, tmp_path):
    """Padding behind packed rows trains no router: what routers did is that of the tokens alone."""
    source = write_model(tmp_path / "experts", **EXPERTS)
    names = ("aux_loss", "expert_load")
    outs = []
    with start("cpu") as world:
        for packing in (True, False):
            changes = {"model": source, "packing": packing, "batch_size": 64}
            settings = workspace.settings("x", micro_batch_size=64, **changes)
            run = prepare(load(None, settings), world)
            (batch,) = run.data.micro_batches(0)
            tokens = run.data.counts(0)[0]
            assert batch.attention_mask.sum() == tokens < batch.input_ids.numel()
            with torch.no_grad():
                outs.append(run.model(**batch.inputs(), metrics=names))
    packed, padded = outs
    for name in names:  # the same probabilities, up to the order in which they are added
        torch.testing.assert_close(packed.metrics[name], padded.metrics[name], rtol=1e-6, atol=0)
    changes |= {"router_aux_loss_coef": 0.5, "steps": 2, "loss_reduction": "sequence"}
    changes |= {"micro_batch_size": 64, "eval_data": workspace.held_out}
    for name, packing in (("packed-experts", True), ("padded-experts", False)):
        main(workspace.settings(name, **{**changes, "packing": packing}))
    keys = ("loss", "grad_norm", "aux_loss", "expert_imbalance", "eval_loss")
    assert_same_metrics(workspace, "padded-experts", "packed-experts", *keys, rel=1e-4)


def test_a_model_without_experts_cannot_balance_them(workspace):
    with pytest.raises(SystemExit) as error:
        main(workspace.settings("dense", router_aux_loss_coef=0.1))
    assert "router_aux_loss_coef=0.1, but LlamaForCausalLM has no experts" in str(error.value)
    with pytest.raises(SystemExit) as error:
        model = write_model(workspace.root / "groups", **GROUPS)
        main(workspace.settings("grouped", model=model, router_aux_loss_coef=0.1))
    assert "router_aux_loss_coef=0.1, but Glm4MoeForCausalLM has no aux_loss" in str(error.value)
