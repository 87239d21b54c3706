"""Detects steps that must not change the weights, and weights that must not be saved."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tigon.layers import Linear
from tigon.train import checkpoint
from tigon.train.build import TrainingRun
from tigon.train.distributed import World, local
from tigon.train.state import WINDOW, TrainState
from tigon.utils.json import list_first

# The square of a larger weight is infinite in float32: no model computes with it
MAX_WEIGHT = torch.finfo(torch.float32).max ** 0.5
MAX_SKIPS = 20  # in a row, after which skipping does not help
ADVICE = "try a lower lr, more warmup_steps or a lower max_grad_norm, or look at the rows"


@dataclass(frozen=True)
class BadStep:
    """Says what is wrong with a step's gradients, or with the weights after it, and what the
    settings do about it; the same on every rank."""

    kind: str  # "nonfinite" or "spike"
    policy: str  # stop, skip or rollback
    text: str
    broken: bool = False  # whether an earlier step has ruined the weights


def check_step(
    run: TrainingRun, step: int, values: dict[str, float], local_loss: float
) -> BadStep | None:
    """Returns why the step's gradients must not change the weights, or None; counts and logs skips.

    `local_loss` is this rank's part of the loss. Raises FloatingPointError if the policy is to
    stop, or to skip where that does not help: weights are ruined or already updated, or too many
    steps have been skipped.
    """
    loss, grad_norm = values["loss"], values["grad_norm"]
    state = run.state
    bad_step = _find_problem(run, step, loss, grad_norm, local_loss)
    state.note_step(loss, grad_norm)
    state.skips = state.skips + 1 if bad_step else 0
    if bad_step is None or bad_step.policy == "rollback":
        return bad_step
    state.skipped += 1
    why, instead = "", ""
    if weights_changed(run, loss):
        why, instead = "The weights were changed in backward, and not saved", "rollback"
    elif bad_step.policy == "stop":
        why, instead = "The weights were not changed", "skip or rollback"
    elif state.skips > MAX_SKIPS:
        why = f"The {MAX_SKIPS} steps before it were skipped too: {ADVICE}"
    elif bad_step.broken:
        why = "Skipping steps does not mend weights"
    elif 2 * state.skipped > run.steps:
        why = f"With it {state.skipped} of {run.steps} steps are skipped, most of the run: {ADVICE}"
    if why:
        raise stop_error(run, step, bad_step, why, instead)
    run.world.log_rank0(f"{bad_step.text}. Skipped")
    return bad_step


def check_skipped(run: TrainingRun, step: int) -> None:
    """Raises FloatingPointError if over half of a run's `step` steps were skipped."""
    if 2 * run.state.skipped > step:
        raise FloatingPointError(
            f"{run.state.skipped} of {step} steps were skipped, most of the run, and nothing is "
            f"exported: {ADVICE}"
        )


def weights_changed(run: TrainingRun, loss: float) -> bool:
    """Returns whether optimizer_in_backward has updated the weights already."""
    return run.in_backward is not None and math.isfinite(loss)


def _find_problem(
    run: TrainingRun, step: int, loss: float, grad_norm: float, local_loss: float
) -> BadStep | None:
    """Returns what is wrong with a step before its update: not finite, a spike; or None."""
    config = run.config
    measured = f"loss {loss:.6g}, gradient norm {grad_norm:.6g}"
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        # The weights before this step are unknown if backward has updated them
        size = 0.0
        if not weights_changed(run, loss):
            size = largest_weight(run.model, run.world, quantized=True)
        broken = is_broken(size)
        if broken:
            since = "from the steps before" if step else "when the run began"
            text = f"{measured}, with weights up to {size:.3g} {since}"
        else:
            ranks = describe_ranks(run.world, local_loss)
            text = f"{measured}{ranks}; {describe_rows(run, step)}"
        return BadStep("nonfinite", config.nonfinite, f"step {step + 1}: {text}", broken)
    if not config.spike_sigma:
        return None
    for name, value, past in (
        ("loss", loss, run.state.losses),
        ("gradient norm", grad_norm, run.state.grad_norms),
    ):
        bound = spike_bound(past, config.spike_sigma)
        if value > bound:
            text = (
                f"step {step + 1}: {name} {value:.6g} is above {bound:.6g}, that is "
                f"{config.spike_sigma:g} standard deviations above the mean of the last "
                f"{len(past)} steps{describe_ranks(run.world, local_loss, largest=True)}; "
                f"{describe_rows(run, step)}"
            )
            return BadStep("spike", config.spike, text)
    return None


def spike_bound(past: Sequence[float], sigma: float) -> float:
    """Returns mean + sigma * stdev as OLMo-core does; inf for fewer than WINDOW / 2 values."""
    if len(past) < WINDOW // 2:
        return math.inf
    return statistics.fmean(past) + sigma * statistics.stdev(past)


def check_weights(run: TrainingRun, step: int) -> BadStep | None:
    """Returns why the weights after `step` steps must be rolled back before they are saved,
    evaluated or exported; None if none is NaN or too large.

    Raises FloatingPointError if one is, and the policy is not to roll back.
    """
    size = largest_weight(run.model, run.world)
    if not is_broken(size):
        return None
    text = f"step {step} left weights up to {size:.3g} (lr {run.config.lr:g}); "
    text += describe_rows(run, step - 1)
    bad_step = BadStep("nonfinite", run.config.nonfinite, text, True)
    if bad_step.policy != "rollback":
        raise stop_error(run, step, bad_step, "Nothing was saved")
    return bad_step


def is_broken(size: float) -> bool:
    """Returns whether the largest weight is too large to compute with, or NaN."""
    return not size <= MAX_WEIGHT


@torch.no_grad()
def largest_weight(model: nn.Module, world: World, *, quantized: bool = False) -> float:
    """Returns the largest absolute weight of all ranks, `quantized` ones too; NaN if any is."""
    weights = [local(p) for p in model.parameters()]
    norms = [*torch._foreach_norm([p for p in weights if p.numel()], math.inf)]
    for layer in model.modules() if quantized else ():
        if isinstance(layer, Linear) and layer.quantized is not None:
            norms.append(torch.linalg.vector_norm(layer.values(), math.inf))
    sizes = [norm.double() for norm in norms] or [torch.zeros((), dtype=torch.double, device="cpu")]
    largest = torch.stack(sizes).max().to(world.device)
    # A reduction of its own, as NCCL's maximum may lose a NaN
    bad = world.all_reduce_max(largest.isnan().double())
    size = world.all_reduce_max(largest.nan_to_num(nan=0.0, posinf=math.inf))
    return math.nan if bad > 0 else float(size)


def describe_ranks(world: World, local_loss: float, *, largest: bool = False) -> str:
    """Returns a text with the ranks whose part of the loss is not finite, or if all are finite and
    with `largest`, with the rank of the largest part; "" without any, or on one rank.

    Every rank calls this.
    """
    if world.size == 1:
        return ""
    parts = [float(part) for part in world.gather(str(local_loss))]
    bad = [f"rank {i}: its part is {x}" for i, x in enumerate(parts) if not math.isfinite(x)]
    if len(bad) == world.size:
        return " (on all ranks)"
    if bad:
        return f" ({'; '.join(bad[:8])}{f' and {len(bad) - 8} more' if len(bad) > 8 else ''})"
    if not largest:
        return ""
    rank = max(range(world.size), key=parts.__getitem__)
    return f" (the largest part of the loss, {parts[rank]:.6g}, is on rank {rank})"


def describe_rows(run: TrainingRun, step: int) -> str:
    """Returns a text with the files and lines of the step's rows, of eight at most."""
    origins = list(dict.fromkeys(run.data.location(step + run.state.offset)))
    return f"its rows are {list_first(origins, 8)}"


def stop_error(
    run: TrainingRun, step: int, bad_step: BadStep, why: str, instead: str = ""
) -> FloatingPointError:
    """Returns the error that ends the run after `step` steps, naming the last checkpoint; waits
    for one that is being written. `instead`: the policies that would go on."""
    run.saver.wait()
    saved = checkpoint.latest(Path(run.config.run_dir, "checkpoints"), step)
    last = f"last checkpoint: {saved}" if saved else "there is no checkpoint"
    if bad_step.broken and not step:
        hint = f"; look at the files of {run.config.model or run.config.init}"
    elif bad_step.broken:
        hint = "; the learning rate may be too high"
    else:
        hint = f"; {bad_step.kind}={instead} would go on" if instead else ""
    return FloatingPointError(f"{bad_step.text}. {why}; {last}{hint}")


def rollback(run: TrainingRun, step: int, bad_step: BadStep) -> int:
    """Loads the last checkpoint and skips rows up to `step`; returns the checkpoint's step.
    FloatingPointError without a checkpoint, or when max_rollbacks are used up."""
    state, config = run.state, run.config
    if state.rollbacks >= config.max_rollbacks:
        raise stop_error(run, step, bad_step, f"max_rollbacks={config.max_rollbacks} are used up")
    run.saver.wait()
    try:
        directory = Path(config.run_dir, "checkpoints")
        source = checkpoint.newest_complete(directory, run.world.log_rank0, until=step)
    except ValueError as error:
        raise stop_error(run, step, bad_step, f"No rollback: {error}") from None
    if source is None:
        raise stop_error(run, step, bad_step, "A rollback needs a checkpoint: save_every")
    checkpoint.load(source, run.model, run.optimizer, run.ema)
    saved_step = checkpoint.step_of(source)
    offset = step + state.offset + 1 - saved_step
    saved = TrainState.of(checkpoint.read_metadata(source))
    vars(state).update(vars(saved), offset=offset, rollbacks=state.rollbacks + 1)
    run.world.log_rank0(
        f"{bad_step.text}. Back to {source}: step {saved_step + 1} takes the rows after these "
        f"(rollback {state.rollbacks} of {config.max_rollbacks})"
    )
    return saved_step
