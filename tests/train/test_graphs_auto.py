"""cuda_graphs=auto: graphs where the first passes wait for launches, and no harm where not.

Clocks and events are made up, and captures are those of test_graphs.py.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tigon
from tests.support.small import LLAMA
from tests.train.test_graphs import again, inputs, played  # noqa: F401
from tigon.train import launch_meter, load
from tigon.train.cuda_graphs import CaptureError, Graphs
from tigon.train.distributed import InputError, World
from tigon.train.graph_checks import uses_graphs
from tigon.train.launch_meter import PASSES, WARM_UP, LaunchMeter
from tigon.train.less_memory import use_less

graphs = importlib.import_module("tigon.train.cuda_graphs")


class Clock:
    """A host and a GPU whose passes take given seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: list[float], device: list[float]):
        self.host, self.device, self.now, self.done = iter(host), iter(device), 0.0, True
        monkeypatch.setattr(launch_meter.time, "perf_counter", self.read)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        self.marks = 0

    def read(self) -> float:
        self.marks += 1
        if self.marks % 2 == 0:
            self.now += next(self.host)
        return self.now

    def event(self, enable_timing: bool) -> Any:
        return SimpleNamespace(
            record=lambda: None,
            query=lambda: self.done,
            elapsed_time=lambda _: 1e3 * next(self.device),
        )


@pytest.mark.parametrize(
    ("host", "device", "bound"),
    [
        ([0.02] * 3, [0.02] * 3, True),
        ([0.02] * 3, [0.08] * 3, False),
        ([0.02, 5.0, 0.02], [0.08, 5.0, 0.08], False),  # the second one compiled
        ([5.0, 0.02, 0.02], [5.0, 0.021, 0.022], True),
        ([0.02] * 3, [0.017] * 3, True),  # the GPU was late, with the step before
    ],
)
def test_shortest_pass_decides(monkeypatch, host, device, bound) -> None:
    clock = Clock(monkeypatch, host, device)
    meter = LaunchMeter()
    for _ in range(WARM_UP + PASSES):
        assert meter.is_launch_bound() is None
        with meter.measuring():
            pass
    clock.done = False  # the GPU is not there yet, and nobody waits for it
    assert meter.is_launch_bound() is None
    clock.done = True
    assert meter.is_launch_bound() is bound
    assert (meter.host, meter.device) == pytest.approx((min(host), min(device)))


@pytest.fixture
def timed(monkeypatch):
    """Makes a model of which launches take a share of a pass, and says what its graphs say."""

    def make(share: float) -> tuple[Any, Graphs, list[str]]:
        torch.manual_seed(0)
        model, said = tigon.Llama.from_config(LLAMA).train(), list[str]()
        made = Graphs(model, said.append, auto=True)
        Clock(monkeypatch, [share] * PASSES, [1.0] * PASSES)
        return model, made, said

    return make


def steps(model: Any, count: int = WARM_UP + PASSES + 4) -> list[list[torch.Tensor]]:
    """The gradients of so many steps of two micro-batches."""
    found = []
    for _ in range(count):
        model.zero_grad()
        for _ in range(2):
            model(**inputs()).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def test_first_micro_batches_are_measured(timed, played) -> None:  # noqa: F811
    """Others may wait for a full queue."""
    model, made, _ = timed(1.0)
    for count in range(1, WARM_UP + PASSES):
        steps(model, 1)
        assert made.meter is not None and made.meter.seen == count
    steps(model, 1)
    assert made.meter is None  # decided before its second micro-batch


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1.0, "used: launching kernels takes 1e+03 of the 1e+03 ms of a forward pass"),
        (0.2, "not used: launching kernels takes 200 of the 1e+03 ms of a forward pass"),
    ],
)
def test_graphs_where_passes_wait_for_launches(timed, played, share, text) -> None:  # noqa: F811
    """And every bit is that of passes without."""
    torch.manual_seed(0)
    expected = steps(tigon.Llama.from_config(LLAMA).train())
    model, made, said = timed(share)
    for found, other in zip(steps(model), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))
    assert said == [f"cuda_graphs=auto: {text}"]
    assert bool(made.captured) == (made.passes > 5) == (share == 1.0)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_capture_that_fails_ends_them(timed, monkeypatch, fails_at) -> None:
    """The first, forward or backward, or that of passes that add to gradients."""
    captures = []

    def capture(run: Any, *args: Any) -> Any:
        captures.append(run)
        if len(captures) == fails_at:
            raise CaptureError("the step cannot be captured (RuntimeError: of 3)")
        return again(run, *args)

    monkeypatch.setattr(graphs, "capture", capture)
    torch.manual_seed(0)
    expected = steps(tigon.Llama.from_config(LLAMA).train())
    model, made, said = timed(1.0)
    for found, other in zip(steps(model), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))
    assert made.off and not made.captured and len(captures) == fails_at
    assert said[1:] == [
        "cuda_graphs=auto: not used: the step cannot be captured (RuntimeError: of 3)"
    ]


def test_only_graphs_that_are_captured_are_turned_off(timed, played) -> None:  # noqa: F811
    """By a step that runs out of memory: before, there is nothing to free."""
    model, made, _ = timed(1.0)
    run: Any = SimpleNamespace(
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        choice=None,
        config=SimpleNamespace(cuda_graphs="auto", micro_batch_size=1),
        world=World(0, 1, torch.device("cpu")),
    )
    with pytest.raises(InputError, match="step 1: full: give a smaller"):
        use_less(run, "step 1: full")
    assert not made.off and made.meter is not None
    steps(model)
    assert made.captured
    use_less(run, "step 9: full")
    assert made.off and not made.captured


def test_runs_that_cannot_have_graphs(workspace, monkeypatch, capsys) -> None:
    cuda = torch.device("cuda")
    model = tigon.Llama.from_config(LLAMA, dtype=torch.bfloat16)
    half = {"device": "auto", "param_dtype": "bfloat16"}
    for changes, ranks, expected, why in (
        (half, 1, True, ""),
        (half | {"cuda_graphs": "false"}, 1, False, ""),
        (half, 2, False, ""),
        ({"device": "cpu"}, 1, False, ""),
        (half | {"packing": "false"}, 1, False, "not used: does not work with packing=false"),
        (half | {"activation_offload": "true"}, 1, False, "not used: does not work with activat"),
        (half | {"task": "kto"}, 1, False, "not used: does not work with task=kto: its answers"),
        ({"device": "auto", "sharding": "full"}, 1, False, "not used: with sharding=full: FSDP2"),
    ):
        config = load(None, workspace.settings("x", **changes))
        device = torch.device("cpu") if config.device == "cpu" else cuda
        assert uses_graphs(config, World(0, ranks, device), model) == expected, changes
        said = capsys.readouterr().out
        assert why in said and bool(said) == bool(why)
    model.activation_offload = True  # as activation_checkpointing=auto may choose
    assert not uses_graphs(load(None, workspace.settings("x", **half)), World(0, 1, cuda), model)
