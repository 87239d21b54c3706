import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.weights.saved import save
from tigon.weights import (
    Layout,
    ReplicaIndex,
    RowSpan,
    ShardSpec,
    TensorSlice,
    load,
    load_into,
    make_entries,
    read,
    shard_slices,
    write_checkpoint,
)


def fused_qkv() -> tuple[dict[str, Tensor], Layout]:
    shapes = {"q": (8, 4), "k": (3, 4), "v": (3, 4), "norm": (4,)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    layout = {
        "qkv": (
            TensorSlice.whole("q", (8, 4)),
            TensorSlice.whole("k", (3, 4), 8),
            TensorSlice.whole("v", (3, 4), 11),
        ),
        "norm": (TensorSlice.whole("norm", (4,)),),
    }
    return tensors, layout


def halves(rank: int) -> TensorSlice:
    """Rank 0 or 1's part of a stored [gate; up], 6 rows each: a slice of either."""
    return TensorSlice("gate_up", (12, 4), (RowSpan(3 * rank, 0, 3), RowSpan(6 + 3 * rank, 3, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [16, 64 << 20])
def test_a_part_of_several_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    for way in ("DIRECT", "STAGING"):
        monkeypatch.setattr(read, way, chunk)
    stored = torch.randn(12, 4)
    checkpoint = save(tmp_path, {"gate_up": stored})
    (tmp_path / "out").mkdir()
    parameters = {name: torch.full((6, 4), torch.nan, dtype=dtype) for name in ("a", "b")}
    layout = {"a": (halves(0),), "b": (halves(1),)}
    load_into(parameters, layout, checkpoint)
    gate, up = stored.to(dtype).split(6)
    assert torch.equal(parameters["a"], torch.cat([gate[:3], up[:3]]))
    assert torch.equal(parameters["b"], torch.cat([gate[3:], up[3:]]))
    write_checkpoint(tmp_path / "out", make_entries(parameters, layout, dtype))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert list(written) == ["gate_up"]
    assert torch.equal(written["gate_up"], stored.to(dtype))

    alone = {"a": torch.empty(6, 4)}
    load_into(alone, {"a": (halves(0),)}, checkpoint)
    assert torch.equal(alone["a"], torch.cat([stored[:3], stored[6:9]]))
    with pytest.raises(
        ValueError, match=r"gate_up \[12, 4\] cannot be written: there are \[\(0, 3"
    ):
        write_checkpoint(tmp_path / "never", make_entries(alone, {"a": (halves(0),)}, dtype))


def test_a_part_of_several_columns(tmp_path: Path) -> None:
    """Two ranks' of six columns: a third of every two, or the rest."""
    stored = torch.randn(5, 6)
    checkpoint = save(tmp_path, {"b": stored})
    (tmp_path / "out").mkdir()
    parameters = {"one": torch.full((5, 2), torch.nan), "two": torch.full((5, 4), torch.nan)}
    layout = {
        "one": shard_slices(
            [TensorSlice.whole("b", (5, 6))], columns(RowSpan(0, 0, 1), RowSpan(3, 1, 1))
        ),
        "two": shard_slices(
            [TensorSlice.whole("b", (5, 6))], columns(RowSpan(1, 0, 2), RowSpan(4, 2, 2))
        ),
    }
    load_into(parameters, layout, checkpoint)
    assert torch.equal(parameters["one"], stored[:, [0, 3]])
    assert torch.equal(parameters["two"], stored[:, [1, 2, 4, 5]])
    write_checkpoint(tmp_path / "out", make_entries(parameters, layout, torch.float32))
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["b"], stored)


def columns(*pieces: RowSpan) -> ShardSpec:
    return ShardSpec((5, 6), 1, tuple((rows, ReplicaIndex()) for rows in pieces))


Q, K = TensorSlice.whole("q", (8, 4)), TensorSlice.whole("k", (3, 4), 8)
UNFILLED = {
    "a row twice": (TensorSlice("q", (8, 4), (RowSpan(0, 0, 8), RowSpan(0, 7, 6))),),
    "a row missing": (Q,),
    "too many": (Q, K, TensorSlice.whole("v", (3, 4), 11)),
    "beyond the tensor": (Q, TensorSlice("k", (3, 4), (RowSpan(1, 8, 3),))),
    "before the tensor": (Q, TensorSlice("k", (3, 4), (RowSpan(-1, 8, 3),))),
    "no matrix": (TensorSlice.whole("norm", (4,)),),
    "other columns": (TensorSlice.whole("q", (8, 5)), TensorSlice.whole("k", (3, 5), 8)),
}


@pytest.mark.parametrize("case", UNFILLED)
def test_layouts_that_do_not_fill(tmp_path: Path, case: str) -> None:
    checkpoint = save(tmp_path, {"q": torch.randn(8, 4), "k": torch.randn(3, 4)})
    with pytest.raises(ValueError, match=r"qk is \[11, 4\], not filled by"):
        load_into({"qk": torch.empty(11, 4)}, {"qk": UNFILLED[case]}, checkpoint)


def test_meta_parameters_are_refused(tmp_path: Path) -> None:
    tensors, layout = fused_qkv()
    parameters = {name: torch.empty(1, device="meta") for name in layout}
    with pytest.raises(ValueError, match="qkv is on the meta device: allocate it first"):
        load_into(parameters, layout, save(tmp_path, tensors))


def test_a_failing_read_ends_the_load(tmp_path: Path) -> None:
    tensors, layout = fused_qkv()
    checkpoint = save(tmp_path, tensors)
    (tmp_path / "model.safetensors").write_bytes(b"")
    parameters = {"qkv": torch.empty(14, 4), "norm": torch.empty(4)}
    with pytest.raises(ValueError, match="ended at byte"):
        load_into(parameters, layout, checkpoint)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("screen", "rank", "slow", "shown"),
    [
        (Terminal(), "0", 0.0, True),
        (Terminal(), "1", 0.0, False),
        (io.StringIO(), "0", 0.0, False),
        (Terminal(), "0", 60.0, False),
    ],
)
def test_the_progress_bar(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    screen: io.StringIO,
    rank: str,
    slow: float,
    shown: bool,
) -> None:
    """On a terminal, of the first rank, if it takes long; it counts what is read."""
    counted: list[tuple[float, float]] = []

    class Bar(load.tqdm):  # type: ignore[name-defined, misc]
        def close(self) -> None:
            counted.append((self.n, self.total))
            super().close()

    monkeypatch.setattr(load, "tqdm", Bar)
    monkeypatch.setattr(load, "SLOW", slow)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("RANK", rank)
    tensors, layout = fused_qkv()
    parameters = {"qkv": torch.empty(14, 4), "norm": torch.empty(4)}
    load_into(parameters, layout, save(tmp_path, tensors))
    text = screen.getvalue()
    assert ("Loading weights" in text) == shown and (shown or not text)
    if shown:
        assert counted[0] == (240, 240)
