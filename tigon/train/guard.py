"""Steps that must not change the weights, and weights that must not be saved."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tigon.layers import Linear
from tigon.train import checkpoint
from tigon.train.build import Run
from tigon.train.distributed import World, format_rank_errors, local
from tigon.train.state import WINDOW, State

# The square of a larger weight is infinite in float32: no model computes with it
LARGEST = torch.finfo(torch.float32).max ** 0.5
SKIPS = 20  # in a row, after which skipping does not help
ADVICE = "try a lower lr, more warmup_steps or a lower max_grad_norm, or look at the rows"


@dataclass(frozen=True)
class Trouble:
    """Why a step's gradients are not to be used; the same on every rank."""

    kind: str  # "nonfinite" or "spike"
    policy: str  # stop, skip or rollback
    text: str
    broken: bool = False  # the weights, by an earlier step


def judge(run: Run, step: int, values: dict[str, float]) -> Trouble | None:
    """Why the step's gradients must not change the weights, or None.

    Takes "own_loss", this rank's part of the loss, out of `values`. Raises FloatingPointError where
    the policy is to stop.
    """
    own_loss, loss, grad_norm = values.pop("own_loss"), values["loss"], values["grad_norm"]
    state = run.state
    trouble = _trouble(run, step, loss, grad_norm, own_loss)
    state.note_step(loss, grad_norm)
    state.skips = state.skips + 1 if trouble else 0
    if trouble is None or trouble.policy == "rollback":
        return trouble
    state.skipped += 1
    if changed(run, loss):
        why = "The weights were changed in backward, and not saved"
        raise stop(run, step, trouble, why, "rollback")
    if trouble.policy == "stop":
        raise stop(run, step, trouble, "The weights were not changed", "skip or rollback")
    if state.skips > SKIPS:
        raise stop(run, step, trouble, f"The {SKIPS} steps before it were skipped too: {ADVICE}")
    if trouble.broken:
        raise stop(run, step, trouble, "Skipping steps does not mend weights")
    if 2 * state.skipped > run.steps:
        why = f"With it {state.skipped} of {run.steps} steps are skipped, most of the run: {ADVICE}"
        raise stop(run, step, trouble, why)
    run.world.log_rank0(f"{trouble.text}. Skipped")
    return trouble


def check_skipped(run: Run, step: int) -> None:
    """Raises FloatingPointError if most of the `step` steps of a run that ends were skipped, as in
    one that ends earlier than it was to."""
    if 2 * run.state.skipped > step:
        raise FloatingPointError(
            f"{run.state.skipped} of {step} steps were skipped, most of the run, and nothing is "
            f"exported: {ADVICE}"
        )


def changed(run: Run, loss: float) -> bool:
    """Whether the step's gradients have changed the weights: backward leaves them out only where
    the loss is not finite."""
    return run.in_backward is not None and math.isfinite(loss)


def _trouble(run: Run, step: int, loss: float, grad_norm: float, own_loss: float) -> Trouble | None:
    config = run.config
    measured = f"loss {loss:.6g}, gradient norm {grad_norm:.6g}"
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        # Of weights that this step has changed, nobody knows how they were
        size = 0.0
        if not changed(run, loss):
            size = largest_weight(run.model, run.world, quantised=True)
        if is_broken(size):
            since = "from the steps before" if step else "when the run began"
            text = f"{measured}, with weights up to {size:.3g} {since}"
        else:
            text = f"{measured}{ranks_of(run.world, own_loss)}; {rows(run, step)}"
        return Trouble("nonfinite", config.nonfinite, f"step {step + 1}: {text}", is_broken(size))
    if not config.spike_sigma:
        return None
    for name, value, past in (
        ("loss", loss, run.state.losses),
        ("gradient norm", grad_norm, run.state.grad_norms),
    ):
        bound = spike_bound(past, config.spike_sigma)
        if value > bound:
            text = f"step {step + 1}: {name} {value:.6g} is above {bound:.6g}, that is "
            text += f"{config.spike_sigma:g} standard deviations above the mean of the last "
            text += f"{len(past)} steps{largest_part(run.world, own_loss)}; {rows(run, step)}"
            return Trouble("spike", config.spike, text)
    return None


def spike_bound(past: Sequence[float], sigma: float) -> float:
    """As OLMo-core's SkipStepOptimizer: no bound before half of the window is there."""
    if len(past) < WINDOW // 2:
        return math.inf
    return statistics.fmean(past) + sigma * statistics.stdev(past)


def check_weights(run: Run, step: int) -> Trouble | None:
    """Before anything is saved, evaluated or exported: what `step` steps have made of them.

    Raises FloatingPointError unless the policy is to roll back.
    """
    size = largest_weight(run.model, run.world)
    if not is_broken(size):
        return None
    text = (
        f"step {step} left weights up to {size:.3g} (lr {run.config.lr:g}); {rows(run, step - 1)}"
    )
    trouble = Trouble("nonfinite", run.config.nonfinite, text, True)
    if trouble.policy != "rollback":
        raise stop(run, step, trouble, "Nothing was saved")
    return trouble


def is_broken(size: float) -> bool:
    return not size <= LARGEST


@torch.no_grad()
def largest_weight(model: nn.Module, world: World, *, quantised: bool = False) -> float:
    """The largest absolute value over all ranks; NaN if any is. Waits for the device.

    `quantised`: also of frozen weights in few bits, which are dequantised one by one.
    """
    own = [local(p) for p in model.parameters()]
    norms = [*torch._foreach_norm([p for p in own if p.numel()], math.inf)]
    for layer in model.modules() if quantised else ():
        if isinstance(layer, Linear) and layer.quantized is not None:
            norms.append(torch.linalg.vector_norm(layer.values(), math.inf))
    sizes = [norm.double() for norm in norms] or [torch.zeros((), dtype=torch.double)]
    largest = torch.stack(sizes).max().to(world.device)
    # Said apart: NCCL's maximum may lose a NaN
    bad = world.all_reduce_max(largest.isnan().double())
    size = world.all_reduce_max(largest.nan_to_num(nan=0.0, posinf=math.inf))
    return math.nan if bad > 0 else float(size)


def ranks_of(world: World, own_loss: float) -> str:
    """On which ranks the loss is not finite, if it is one of several."""
    if world.size == 1:
        return ""
    answers = world.gather("" if math.isfinite(own_loss) else str(own_loss))
    if not any(answers):
        return ""
    if all(answers):
        return f" (on all ranks{', which share rows' * (world.data.size == 1)})"
    count = world.size // world.data.size
    groups = [answers[first : first + count] for first in range(0, world.size, count)]
    if count == 1 or any(len(set(group)) > 1 for group in groups):
        return f" ({format_rank_errors([own and f'its part is {own}' for own in answers])})"
    # The loss of one is that of all who share its rows, whichever of them it began on
    bad = [(i * count, group[0]) for i, group in enumerate(groups) if group[0]]
    return f" ({'; '.join(f'{sharing(world, i)}: their part is {own}' for i, own in bad)})"


def sharing(world: World, rank: int) -> str:
    """The rank; of several with the same rows, which have the same loss, all of them."""
    count = world.size // world.data.size
    first = rank // count * count
    return f"rank {rank}" if count == 1 else f"ranks {first}-{first + count - 1}, which share rows"


def largest_part(world: World, own_loss: float) -> str:
    """Which rank has the largest part of the loss, if there are several."""
    if world.size == 1:
        return ""
    parts = [float(part) for part in world.gather(str(own_loss))]
    rank = max(range(world.size), key=parts.__getitem__)
    return f" (the largest part of the loss, {parts[rank]:.6g}, is on {sharing(world, rank)})"


def rows(run: Run, step: int) -> str:
    where = list(dict.fromkeys(run.data.location(step + run.state.offset)))
    more = f" and {len(where) - 8} more" if len(where) > 8 else ""
    return f"its rows are {', '.join(where[:8])}{more}"


def stop(run: Run, step: int, trouble: Trouble, why: str, instead: str = "") -> FloatingPointError:
    """After so many steps; checkpoints of later ones were passed over when the run began.
    `instead`: policies that would go on."""
    run.saver.wait()
    saved = checkpoint.latest(Path(run.config.run_dir, "checkpoints"), step)
    last = f"last checkpoint: {saved}" if saved else "there is no checkpoint"
    if trouble.broken and not step:
        hint = f"; look at the files of {run.config.model or run.config.init}"
    elif trouble.broken:
        hint = "; the learning rate may be too high"
    else:
        hint = f"; {trouble.kind}={instead} would go on" if instead else ""
    return FloatingPointError(f"{trouble.text}. {why}; {last}{hint}")


def rollback(run: Run, step: int, trouble: Trouble) -> int:
    """The last checkpoint's weights, with the rows that come after those of `step`. Returns the
    number of steps that are done."""
    state, config = run.state, run.config
    if state.rollbacks >= config.max_rollbacks:
        raise stop(run, step, trouble, f"max_rollbacks={config.max_rollbacks} are used up")
    run.saver.wait()
    try:
        directory = Path(config.run_dir, "checkpoints")
        source = checkpoint.newest_whole(directory, run.world.log_rank0, until=step)
    except ValueError as error:
        raise stop(run, step, trouble, f"No rollback: {error}") from None
    if source is None:
        raise stop(run, step, trouble, "A rollback needs a checkpoint: save_every")
    checkpoint.load(source, run.model, run.optimizer, run.ema)
    back = checkpoint.step_of(source)
    offset = step + state.offset + 1 - back
    state.return_to(State.of(checkpoint.read_metadata(source)), offset)
    run.world.log_rank0(
        f"{trouble.text}. Back to {source}: step {back + 1} takes the rows after these "
        f"(rollback {state.rollbacks} of {config.max_rollbacks})"
    )
    return back
