"""Which settings of a run exclude or need each other, as tables.

Two settings that exclude each other are a row of CONFLICTS, a setting that needs another is one of
REQUIRES, and other faults are rows of FAULTS.
"""

import re
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from tigon.utils.json import quote

MAX_TOKENS = 2**28  # of a row; an estimate has masks of pairs of them, which are to fit 64 bits

# A condition is `name` (differs from its default), name=value, name=a|b or name>number; several are
# joined by ` & `, and alternatives of what is required by ` or `
CONFLICTS = (
    # condition, condition, why or what to do
    ("epochs", "steps", "give one of them"),
    ("eval_fraction", "eval_data", "give one of them"),
    ("lora.quantize=keep", "init", "init has no quantized checkpoint: give lora.quantize=nf4"),
    ("parallel.replicate>1", "sharding=gradients", "each rank has all weights then: drop one"),
    ("cuda_graphs=true", "parallel.tensor>1", "a graph captures no communication between ranks"),
    ("lora.quantize", "parallel.tensor>1", "quantized weights are not sharded over ranks"),
    ("sharding=gradients", "parallel.expert>1", "experts are on fewer ranks than other weights"),
    ("cuda_graphs=true", "parallel.expert>1", "a graph captures no communication between ranks"),
    ("optimizer_offload", "optimizer=muon", "its updates take whole matrices: drop one"),
    (
        "optimizer=muon",
        "param_dtype=bfloat16 & stochastic_rounding=true",
        "muon rounds to nearest: give param_dtype=float32, or stochastic_rounding=false",
    ),
    ("cuda_graphs=true", "device=cpu", "only a GPU has graphs"),
    ("cuda_graphs=true", "task=kto", "its answers have lengths without end, and a graph has one"),
    ("cuda_graphs=true", "packing=false", "a graph has one length: give packing=true"),
    ("cuda_graphs=true", "activation_offload", "copies to host memory take longer: drop one"),
    ("optimizer_in_backward", "optimizer=muon", "ranks exchange whole matrices: give another"),
    ("optimizer_in_backward", "sharding=gradients", "it sums after backward: give sharding=full"),
    ("optimizer_in_backward", "cuda_graphs=true", "graphs keep all gradients in memory: drop one"),
    (
        "optimizer_in_backward",
        "spike=skip & spike_sigma>0",
        "a spike is known after the update: give spike=rollback or stop, or spike_sigma=0",
    ),
    ("ema_decay", "lora", "leave one out"),
    ("optimizer=muon", "lora", "leave one out"),
    ("sharding=gradients", "lora", "leave one out"),
)
REQUIRES = (
    # condition, what it needs, why
    ("init", "tokenizer", "a directory or hub repository"),
    ("revision", "model", "it is that of a hub repository"),
    ("keep_best", "eval_data or eval_fraction", "the best has the lowest eval loss"),
    ("hf_best", "eval_data or eval_fraction", "the best has the lowest eval loss"),
    ("sample_prompts", "eval_data or eval_fraction", "samples are part of an evaluation"),
    ("predictions", "eval_data or eval_fraction", ""),
    ("return_logits", "hooks", "nothing else would see them"),
    ("eval_return_logits=true", "hooks", "nothing else would see them"),
    ("logits_to_keep", "packing=false", "a packed line has several sequences"),
    ("eval_logits_to_keep>0", "packing=false", "a packed line has several sequences"),
    ("patience", "eval_every", "it counts evaluations"),
    ("patience", "eval_data or eval_fraction", "it counts evaluations"),
    ("streaming", "steps", "a stream has no known end"),
    ("push_to_hub", "export=true", "it pushes run_dir/hf"),
    ("momentum", "optimizer=muon|sgd", ""),
    ("nesterov", "optimizer=muon|sgd", ""),
    ("ns_steps", "optimizer=muon", ""),
    ("adjust_lr_fn", "optimizer=muon", ""),
    ("adamw_lr", "optimizer=muon", ""),
    ("decay_steps", "schedule=wsd", ""),
    ("decay_type", "schedule=wsd", ""),
    ("nesterov=true & optimizer=sgd", "momentum>0", "such as momentum=0.9"),
    ("adamw_lr>0", "lr>0", "it follows the schedule of lr; freeze the others instead"),
    ("eval.include_path", "eval.tasks", "it has tasks to name"),
    ("fp8", "dtype=auto|bfloat16", ""),
    ("fp8_except", "fp8=true", ""),
    ("optimizer_in_backward", "max_grad_norm=0", "clipping needs the norm of all gradients"),
    ("push_to_hub & lora", "lora.merge=true", "it pushes run_dir/hf; `hf upload` an adapter"),
    ("lora.merge", "export=true", "it is about run_dir/hf"),
    ("param_dtype=bfloat16", "dtype=auto|bfloat16", ""),
    ("label_smoothing & task=distill", "cross_entropy_weight>0", "it is of the cross-entropy"),
    ("z_loss & task=distill", "cross_entropy_weight>0", "it is of the cross-entropy"),
    ("reference & task=grpo", "beta>0", "without which it has no effect"),
    ("max_completion_length & task=grpo", "loss_type=dr_grpo", "the others do not use it"),
    ("loss_type=dr_grpo & task=grpo", "max_completion_length", "the loss is divided by it"),
)


def _find_group(config: Any, chosen: Callable[[Any], Any]) -> tuple[str, Any] | None:
    """Returns the first parameter group that is chosen, and its name."""
    groups = enumerate(config.parameter_groups)
    return next(((f"parameter_groups[{i}]", g) for i, g in groups if chosen(g)), None)


TERM = re.compile(r"([\w.]+)(?:(=|>)(.+))?")
FAULTS: tuple[tuple[Callable[[Any], Any], str], ...] = (
    # whether or where a config is at fault, and what to say
    (lambda c: not c.run_dir, "run_dir is required: where everything that the run writes goes"),
    (lambda c: not c.data, "data is required: training files, globs or hf://owner/name"),
    (
        lambda c: not (c.model or c.init),
        "model is required: a directory or hub repository to fine-tune; or init, a config.json to "
        "train from scratch",
    ),
    (
        lambda c: bool(c.model and c.init),
        "model={c.model} is to fine-tune, init={c.init} to train from scratch: leave one out",
    ),
    (
        lambda c: c.micro_batch_size != "auto" and c.micro_batch_size * c.seq_len > MAX_TOKENS,
        "micro_batch_size={c.micro_batch_size} rows of seq_len={c.seq_len} are more than "
        f"{MAX_TOKENS} tokens in one forward",
    ),
    (
        lambda c: c.micro_batch_size != "auto" and c.batch_size % c.micro_batch_size,
        "batch_size={c.batch_size} must be a multiple of micro_batch_size={c.micro_batch_size}",
    ),
    (
        lambda c: 1 in (c.logits_to_keep, c.eval_logits_to_keep),
        "logits_to_keep=1 leaves nothing to learn: the last position of a sequence predicts no "
        "token; k keeps the predictions of its last k - 1 tokens",
    ),
    (
        lambda c: c.warmup_steps >= 1 and c.warmup_steps % 1,
        "warmup_steps={c.warmup_steps} is neither a number of steps nor a share below 1",
    ),
    (
        lambda c: c.decay_steps >= 1 and c.decay_steps % 1,
        "decay_steps={c.decay_steps} is neither a number of steps nor a share below 1",
    ),
    (
        lambda c: c.decay_steps in (0, 1),
        "decay_steps={c.decay_steps} leaves schedule=wsd no step to fall in, as the first of them "
        "still has lr: give 2 or more, or schedule=constant",
    ),
    (
        lambda c: None if c.lr else _find_group(c, lambda g: g.lr),
        "lr=0 leaves {0[0]}.lr={0[1].lr} without a schedule: freeze the others instead",
    ),
    (
        lambda c: _find_group(c, lambda g: g.freeze and (g.lr, g.weight_decay) != (None, None)),
        "{0[0]}: with freeze, lr and weight_decay mean nothing",
    ),
    (
        lambda c: c.task == "kto" and not (c.desirable_weight or c.undesirable_weight),
        "desirable_weight=0 and undesirable_weight=0 leave kto nothing to learn: give one of them "
        "a value above 0",
    ),
    (
        lambda c: c.beta == 0 and c.task in ("dpo", "ipo", "apo", "cpo", "simpo", "orpo", "kto"),
        "beta={c.beta:g} of task={c.task} must be above 0",
    ),
    (
        lambda c: c.task == "distill" and (c.beta or 0) > 1,
        "beta={c.beta:g} of task=distill is not in [0, 1]",
    ),
    (
        lambda c: next((name for name in c.log_to if c.log_to.count(name) > 1), None),
        "log_to has {0} more than once: name it once",
    ),
    (
        lambda c: c.push_to_hub.lower() in ("true", "false"),  # as in TRL; it could be a name
        "push_to_hub={c.push_to_hub} is no repository: give its name (owner/name), or leave it out "
        "to push nothing",
    ),
)


def check_settings(config: Any) -> None:
    """Raises ValueError for settings that are at fault, in conflict, or lack what they need."""
    for fails, fault in FAULTS:
        if where := fails(config):
            raise ValueError(fault.format(where, c=config))
    for first, second, advice in CONFLICTS:
        if holds(config, first) and holds(config, second):
            terms = f"{show_condition(config, first)} does not work with "
            raise ValueError(f"{terms}{show_condition(config, second)}: {advice}")
    for condition, needed, reason in REQUIRES:
        if holds(config, condition) and not any(holds(config, n) for n in needed.split(" or ")):
            verb = "need" if " & " in condition else "needs"
            text = f"{show_condition(config, condition)} {verb} {needed.replace('|', ' or ')}"
            match = TERM.fullmatch(needed)
            value = setting_value(config, match[1])[0] if match and match[2] == "=" else None
            if value is not None:  # None: the task chooses it
                text += f", not {show_value(value)}"
            raise ValueError(f"{text}: {reason}" if reason else text)


def setting_value(config: Any, name: str) -> tuple[Any, Any]:
    """Returns the value and the default of a setting; both None in a group that is null."""
    first, _, rest = name.partition(".")
    value, default = getattr(config, first), type(config).__dataclass_fields__[first].default
    if not rest:
        return value, default
    if not is_dataclass(value):  # null or auto
        return None, None
    return setting_value(value, rest)


def holds(config: Any, condition: str) -> bool:
    """Returns whether the config fulfils a condition of CONFLICTS or REQUIRES."""
    return all(_term_holds(config, term) for term in condition.split(" & "))


def _term_holds(config: Any, term: str) -> bool:
    """Returns whether a term of CONFLICTS or REQUIRES, such as `packing=false`, holds."""
    match = TERM.fullmatch(term)
    assert match is not None, term
    name, operator, expected = match.groups()
    value, default = setting_value(config, name)
    if operator is None:
        return value != default
    if operator == ">":
        return (value or 0) > float(expected)
    return show_value(value) in expected.split("|")


def show_condition(config: Any, condition: str) -> str:
    """Returns the settings of a condition with their values, for messages."""
    names = [re.split("[=>]", term)[0] for term in condition.split(" & ")]
    values = {name: setting_value(config, name)[0] for name in names}
    return " and ".join(n if is_dataclass(v) else f"{n}={show_value(v)}" for n, v in values.items())


def show_value(value: Any) -> str:
    """Returns a value as a command line has it."""
    if isinstance(value, tuple):
        return quote([*value])
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return str(value).lower() if value is None or isinstance(value, bool) else value
