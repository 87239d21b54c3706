"""The gated delta rule: chunks, packed rows, states and steps, beside float64 token by token.

# B batch, T tokens, K key heads, H value heads, D head dim, S packed sequences
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import definitions as exact
from tests.kernels.conftest import CUDA
from tigon.kernels import gated_delta_rule, gated_delta_rule_ref, gated_delta_step
from tigon.kernels.delta import gated_delta_backward as backward
from tigon.kernels.delta import gated_delta_forward as forward
from tigon.kernels.delta.gated_delta import MAX_STEP_TOKENS
from tigon.kernels.delta.gated_delta_step import gated_delta_tokens
from tigon.kernels.delta.gated_delta_tiles import (
    CHUNK,
    MAX_DIM,
    SEQUENCES,
    DeltaLaunch,
    make_chunks,
)

Inputs = dict[str, Tensor]


def draw(T: int, K: int = 1, H: int = 2, D: int = 16, B: int = 1) -> Inputs:
    """What a layer gives: unit keys, scaled unit queries."""
    q, k = (F.normalize(torch.randn(B, T, K, D), dim=-1) for _ in "qk")
    v, g = torch.randn(B, T, H, D), -F.softplus(torch.randn(B, T, H))
    return {"q": q * D**-0.5, "k": k, "v": v, "g": g, "beta": torch.randn(B, T, H).sigmoid()}


def narrowed(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x if name == "g" else x.to(dtype) for name, x in inputs.items()}


def results(rule: Any, inputs: Inputs, ups: list[Tensor], **how: Any) -> dict[str, Tensor]:
    """Outputs, states and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o, final = rule(**leaves, **how)
    given = [up.to(y.dtype) for up, y in zip(ups, (o, final), strict=True)]
    grads = torch.autograd.grad((o, final), list(leaves.values()), given)
    return {"o": o, "state": final} | {f"d{n}": x for n, x in zip(leaves, grads, strict=True)}


def both(inputs: Inputs, **how: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ours and the truth, whose upstream gradients are the same."""
    o, final = exact.gated_delta_rule(**inputs, **how)
    ups = [torch.randn(o.shape), torch.randn(final.shape)]
    truth = {name: x.double() for name, x in inputs.items()}
    ours = results(gated_delta_rule, inputs, ups, **how)
    return ours, results(exact.gated_delta_rule, truth, ups, **how)


def assert_exact(inputs: Inputs, most: float = 1e-5, **how: Any) -> None:
    """In the norm of each result; a head at a time, so that none hides behind another."""
    ours, truth = both(inputs, **how)
    for name, x in ours.items():
        head = 1 if name == "state" else 2
        # The gradient of a decay is a difference of what later outputs gain and lose
        floor = 1e-4 * truth["o"].norm() if name == "dg" else 1e-9
        for a, b in zip(x.double().unbind(head), truth[name].unbind(head), strict=True):
            assert (a - b).norm() <= most * b.norm() + floor, name


def test_heads_that_forget_at_every_pace() -> None:
    """From nothing to e^-1300 in a chunk, of which the inverse is no number."""
    inputs = draw(100, H=4)
    inputs["g"] = inputs["g"] * torch.tensor([0.0, 1e-3, 1.0, 25.0])
    assert inputs["g"][0, :64].sum(0)[-1] < -900
    assert_exact(inputs, 1e-4)  # as the sum of logarithms is rounded


def test_heads_that_remember() -> None:
    inputs = draw(300)
    inputs["g"] = 1e-3 * inputs["g"]
    assert_exact(inputs)


def test_equal_keys() -> None:
    """Powers of the matrix that is solved for grow to 1e17 here."""
    inputs = draw(64)
    inputs["k"] = inputs["k"][:, :1].repeat(1, 64, 1, 1)
    inputs["g"], inputs["beta"] = 0 * inputs["g"], torch.ones_like(inputs["beta"])
    assert_exact(inputs)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_betas_at_their_ends(beta: float) -> None:
    inputs = draw(70)
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    ours, truth = both(inputs)
    for name, x in ours.items():
        torch.testing.assert_close(x.double(), truth[name].double(), rtol=1e-4, atol=1e-5)


def test_packed_sequences_are_rows_apart() -> None:
    lengths = [5, 64, 0, 70, 1]
    inputs, states = draw(sum(lengths)), torch.randn(len(lengths), 2, 16, 16)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    o_up, state_up = torch.randn(1, sum(lengths), 2, 16), torch.randn(states.shape)
    packed = results(gated_delta_rule, inputs, [o_up, state_up], cu_seqlens=bounds, state=states)
    for n, length in enumerate(lengths):
        part = slice(int(bounds[n]), int(bounds[n + 1]))
        own = {name: x[:, part] for name, x in inputs.items()}
        ups = [o_up[:, part], state_up[n : n + 1]]
        alone = results(gated_delta_rule, own, ups, state=states[n : n + 1])
        for name, x in alone.items():
            found = packed[name][n : n + 1] if name == "state" else packed[name][:, part]
            torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-6)
        assert (packed["o"][:, part].shape[1]) == length


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("dim", [16, 6])  # rows that the copy engine takes, and others
def test_neighbors_do_not_matter(dim: int) -> None:
    """Boxes of tokens go on into the next sequence, where numbers may be huge or none."""
    inputs = narrowed(draw(142, D=dim), torch.float16)
    bounds = torch.tensor([0, 3, 70, 135, 142]).int()
    ups = [torch.randn(1, 142, 2, dim), torch.randn(4, 2, dim, dim)]
    expected = results(gated_delta_rule, inputs, ups, cu_seqlens=bounds)
    for x in (*inputs.values(), ups[0]):
        x[:, 3:70], x[:, 135:] = float("nan"), 1e30
    found = results(gated_delta_rule, inputs, ups, cu_seqlens=bounds)
    for name, x in found.items():
        at = [0, 2] if name == "state" else (0, [*range(3), *range(70, 135)])
        torch.testing.assert_close(x[at], expected[name][at], rtol=1e-6, atol=1e-6)


def test_chunks_of_many_sequences(kernels_only: None) -> None:
    """More of them than are counted at once."""
    lengths = [1 + 37 * i % 190 for i in range(2 * SEQUENCES + 3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    starts = [
        (bounds[i].item() + at, min(CHUNK, length - at))
        for i, length in enumerate(lengths)
        for at in range(0, length, CHUNK)
    ]
    made = make_chunks(torch.empty(1, sum(lengths), 1, 16), bounds)
    counts = torch.tensor([-(-length // CHUNK) for length in lengths]).cumsum(0)
    assert made.offsets.tolist() == [0, *counts.tolist()]
    assert made.table[:, : len(starts)].T.tolist() == [[*each] for each in starts]
    assert not made.table[:, len(starts) :].any()


def test_rows_are_independent() -> None:
    inputs = draw(70, B=3)
    o, final = gated_delta_rule(**inputs)
    alone = gated_delta_rule(**{name: x[1:2] for name, x in inputs.items()})
    torch.testing.assert_close((o[1:2], final[1:2]), alone, rtol=1e-6, atol=1e-6)


def test_pieces_continue_from_the_state() -> None:
    inputs = draw(150)
    o, final = gated_delta_rule(**inputs)
    state, outputs = None, []
    for first, last in ((0, 70), (70, 71), (71, 150)):
        part = {name: x[:, first:last] for name, x in inputs.items()}
        piece, state = gated_delta_rule(**part, state=state)
        outputs.append(piece)
    torch.testing.assert_close((torch.cat(outputs, 1), state), (o, final), rtol=1e-5, atol=1e-5)


def test_padding_leaves_the_state() -> None:
    """On the left and on the right, where g, beta and k are 0; no token looks at v there."""
    inputs = draw(80)
    o, final = gated_delta_rule(**inputs)
    padded = {name: F.pad(x.movedim(1, -1), (7, 9)).movedim(-1, 1) for name, x in inputs.items()}
    for name in ("q", "v"):
        padded[name][:, :7], padded[name][:, -9:] = 3.0, 3.0
    found, state = gated_delta_rule(**padded)
    torch.testing.assert_close((found[:, 7:-9], state), (o, final), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)
@pytest.mark.parametrize("shape", [(150, 2, 4, 32), (70, 1, 3, 24)])
def test_half_precision(dtype: torch.dtype, most: float, shape: tuple[int, ...], path: str) -> None:
    """States and gates stay float32; products are of rounded numbers."""
    if dtype == torch.bfloat16 and path == "triton" and not CUDA:
        pytest.skip("the interpreter has no products of bf16")
    inputs = narrowed(draw(*shape), dtype)
    ours, truth = both(inputs)
    for name, x in ours.items():
        wide = name in ("state", "dg")
        assert x.dtype == (torch.float32 if wide else dtype)
        assert (x.double() - truth[name]).norm() <= most * truth[name].norm(), name


def test_wide_heads_take_the_reference() -> None:
    inputs = draw(3, D=MAX_DIM + 16)
    torch.testing.assert_close(gated_delta_rule(**inputs), gated_delta_rule_ref(**inputs))


def test_gradient_of_the_state_is_refused() -> None:
    state = torch.zeros(1, 2, 16, 16, requires_grad=True)
    with pytest.raises(ValueError, match="detach it"):
        gated_delta_rule(**draw(3), state=state)


# Steps


@pytest.mark.parametrize("T", [1, 3, MAX_STEP_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_are_the_rule(T: int, dtype: torch.dtype) -> None:
    inputs, state = narrowed(draw(T, K=2, H=6, D=24, B=3), dtype), torch.randn(3, 6, 24, 24)
    moved = state.clone()
    o = gated_delta_step(**inputs, state=moved)
    truth, final = exact.gated_delta_rule(**inputs, state=state)
    assert o.dtype == dtype and not o.requires_grad
    torch.testing.assert_close(
        o.double(), truth, rtol=1e-5, atol=1e-3 if dtype.itemsize == 2 else 1e-5
    )
    torch.testing.assert_close(moved.double(), final, rtol=1e-5, atol=1e-5)


def test_step_of_a_strided_state_writes_to_it() -> None:
    inputs, state = draw(1), torch.randn(1, 2, 16, 16)
    strided = torch.stack((state, state), -1)[..., 0]
    expected = gated_delta_step(**inputs, state=state)
    torch.testing.assert_close(gated_delta_step(**inputs, state=strided), expected)
    torch.testing.assert_close(strided, state)


def test_step_keeps_torchs_rules(kernels_only: None) -> None:
    inputs = draw(2, B=2)
    given = (*inputs.values(), torch.randn(2, 2, 16, 16))
    torch.library.opcheck(
        gated_delta_tokens.op, given, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
def test_step_in_a_graph(kernels_only: None) -> None:
    inputs = narrowed(draw(1, K=2, H=4, D=128, B=2), torch.bfloat16)
    state = torch.randn(2, 4, 128, 128)
    begin = state.clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        gated_delta_step(**inputs, state=state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gated_delta_step(**inputs, state=state)
    state.copy_(begin)
    graph.replay()
    assert torch.equal(captured, gated_delta_step(**inputs, state=begin))
    assert torch.equal(state, begin)


# What Triton makes of each tile on a GPU

SCANS = [DeltaLaunch(*s) for s in ((64, 4, 2), (64, 4, 3), (128, 8, 2))]
TILES: list[dict[str, Any]] = [
    *({"SCAN": s, "SCAN_FEW": s, "SCANS": s} for s in SCANS),
    *({"MIX": DeltaLaunch(0, 4, n)} for n in (1, 2)),
    *({"STATES": DeltaLaunch(*s)} for s in ((64, 4, 2), (32, 4, 2))),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_every_tile(
    tiles: dict[str, Any],
    dtype: torch.dtype,
    most: float,
    kernels_only: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton 3.4 to 3.7.0 miscompile some forms of products on Hopper, and some tiles alone."""
    for name, launch in tiles.items():
        for module in (forward, backward):
            monkeypatch.setattr(module, name, launch, raising=False)
    inputs = narrowed(draw(300, K=2, H=4, D=128), dtype)
    bounds = torch.tensor([0, 64, 65, 170, 300]).int()
    o, final = gated_delta_rule_ref(**inputs, cu_seqlens=bounds)
    ups = [torch.randn(o.shape), torch.randn(final.shape)]
    truth = {name: x.double() for name, x in inputs.items()}
    ours = results(gated_delta_rule, inputs, ups, cu_seqlens=bounds)
    for name, right in results(gated_delta_rule_ref, truth, ups, cu_seqlens=bounds).items():
        assert (ours[name].double() - right).norm() <= most * right.norm(), name
