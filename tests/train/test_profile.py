"""Where the time of steps goes: traces, and times that add up."""

import gzip
import json

import pytest
import torch

from tigon.train import load, main
from tigon.train.config import Profile
from tigon.train.profile import KINDS, STEP, Interval, Profiler, by_kind, kind_of, table
from tigon.train.record import read_metrics


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal>", "matrix products"),
        ("_grouped_product_kernel", "matrix products"),
        ("aten::mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<FlashAttnFwdSm90>>", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("c10d::allreduce_", "collectives"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::_foreach_norm", "optimizer"),
        ("_adamw_table_kernel", "optimizer"),
        ("_adamw_tensor_kernel", "optimizer"),
        ("_squares_kernel", "optimizer"),
        ("_rope_kernel", "fused kernels"),
        ("_qk_norm_rope_backward_kernel", "fused kernels"),
        ("_rows_kernel", "fused kernels"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("aten::cat", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", "other"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp>", "other"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name) == kind


def test_each_moment_counts_once():
    found = [
        Interval("matrix products", 0, 40),
        Interval("collectives", 30, 60),  # behind the product for 10
        Interval("copies", 55, 65),
        Interval("matrix products", 90, 120),  # of which 20 are after the step
        Interval("other", 200, 230),
    ]
    times = by_kind(found, [(0, 100), (200, 300)])
    alone = {kind: row["alone"] * 2000 for kind, row in times.items() if row["alone"]}
    expected = {"matrix products": 50, "collectives": 20, "copies": 5, "other": 30}
    assert alone == pytest.approx(expected | {"waiting": 95})
    in_all = {kind: row["in_all"] * 2000 for kind, row in times.items() if row["in_all"]}
    assert in_all == pytest.approx(
        {"matrix products": 50, "collectives": 30, "copies": 10, "other": 30, "waiting": 95}
    )
    lines = table(times).splitlines()
    assert lines[1].split() == ["waiting", "0.05", "47.5%", "0.05"]
    assert lines[-1].split() == ["step", "0.10", "100.0%"]


def test_a_profiled_run_is_the_same_bits(workspace, capsys):
    settings = {"steps": 5, "eval_data": workspace.held_out, "eval_every": 2}
    main(workspace.settings("unprofiled", **settings))
    main(workspace.settings("profiled", profile="{start: 2, steps: 2}", **settings))
    for key in ("loss", "grad_norm", "eval_loss"):
        assert workspace.metrics("profiled", key) == workspace.metrics("unprofiled", key)
    run = workspace.root / "profiled"
    facts = json.loads((run / "profile/table.json").read_text())
    assert (facts["first_step"], facts["last_step"]) == (2, 3)
    times = {kind: row["alone"] for kind, row in facts["milliseconds"].items()}
    assert set(times) == {*KINDS, "other", "waiting"}
    assert all(times[kind] > 0 for kind in ("matrix products", "attention", "optimizer"))
    seconds = [
        row["step_seconds"] for row in read_metrics(run / "metrics.jsonl")[1:] if "loss" in row
    ]
    # Without the evaluation between the two, and without what comes after a step
    assert sum(times.values()) == pytest.approx(500 * sum(seconds[1:3]), rel=0.5)
    text = (run / "profile/table.txt").read_text()
    assert text.startswith("steps 2 to 3: milliseconds a step, on the CPU of rank 0\n")
    assert text in capsys.readouterr().out
    with gzip.open(run / "profile/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == STEP for event in events) == 2
    assert any("aten::mm" in event.get("name", "") for event in events)


def test_settings_of_a_profile(workspace, tmp_path):
    assert load(None, [*workspace.settings("x"), "profile.start=2"]).profile == Profile(start=2)
    config = tmp_path / "c.yaml"
    config.write_text("profile: {steps: 2}\n")
    found = load(config, workspace.settings("x"))
    assert (found.profile.start, found.profile.steps) == (10, 2)
    assert load(config, [*workspace.settings("x"), "profile=null"]).profile is None
    with pytest.raises(ValueError, match=r"unknown setting 'profile\.step'; did you mean 'steps'"):
        load(None, [*workspace.settings("x"), "profile={step: 2}"])


class Silent:
    """In place of torch's profiler, which takes seconds."""

    def __init__(self, **_):
        self.stopped = False

    def start(self):
        pass

    def stop(self):
        self.stopped = True


@pytest.fixture
def profiler(world, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", Silent)
    return lambda start, steps, done, of: Profiler(
        Profile(start=start, steps=steps), str(tmp_path), world, done, of
    )


def test_a_run_that_ends_before_them_profiles_those_that_it_has(profiler, monkeypatch):
    written = []
    monkeypatch.setattr(Profiler, "_write", lambda self, _: written.append((self.first, self.last)))
    made = profiler(2, 3, 0, 2)
    for step in (1, 2):
        made.begin(step)
        made.end(step)
    assert written == [(2, 2)] and made.running is None


def test_a_profile_that_cannot_be_written_ends_no_run(profiler, tmp_path, capsys):
    (tmp_path / "profile").write_text("in the way")
    made = profiler(2, 1, 0, 4)
    for step in (1, 2, 3):
        made.begin(step)
        made.end(step)
    assert "no profile: [Errno 17]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("start", "steps", "done", "of"), [(5, 2, 0, 4), (2, 3, 4, 8)], ids=["beyond", "resumed past"]
)
def test_steps_that_do_not_come_are_said(profiler, capsys, start, steps, done, of):
    made = profiler(start, steps, done, of)
    assert "nothing is profiled" in capsys.readouterr().out
    for step in range(done + 1, of + 1):
        made.begin(step)
        assert made.running is None


def test_after_a_kill_the_rest_is_profiled_and_an_early_end_is_said(profiler, capsys):
    made = profiler(2, 4, 3, 8)  # 2 to 5, of which 4 and 5 are left
    made.begin(4)
    made.end(4)
    made.close()
    assert capsys.readouterr().out == "no profile: the run ended before step 5\n"


def test_a_rollback_begins_the_profile_again(profiler):
    made = profiler(3, 3, 0, 8)
    made.begin(3)
    made.end(3)
    before = made.running
    made.begin(4)  # and back to step 2
    made.begin(2)
    assert before.stopped and made.running is None
    made.end(2)
    made.begin(3)
    assert made.running not in (None, before)
    made.close()
