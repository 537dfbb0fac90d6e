"""A run saved in one layout goes on in another, optimizer state included, as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import OptimizerFiles, load_tensors
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses, stop_after
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, bit_equal, config, run_to_end

TP2, TP4, PP2 = {"model_parallel_size": 2}, {"model_parallel_size": 4}, {"pipe_parallel_size": 2}
PP4 = {"pipe_parallel_size": 4}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2 x pp2": (4, TP2 | PP2),
    "dp4": (4, {}),
    "dp4 zero1": (4, zero(1)),
    "dp4 zero3": (4, zero(3)),
    "dp2 zero2": (2, zero(2)),
    "tp4": (4, TP4),
    "pp4": (4, PP4),
    "dp2 x tp2 zero1": (4, TP2 | zero(1)),
    "dp2 x tp2 zero3": (4, TP2 | zero(3)),
}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
MODELS = {"neox": NEOX | {"no_weight_tying": True}, "llama, tied": LLAMA, "rpe": RPE, "lion": NEOX | LION}
# from, to, model, precision; tp2 x pp2 goes everywhere, every ZeRO stage comes from and goes to another.
CELLS = [
    ("tp2 x pp2", "dp4 zero1", "llama, tied", "bfloat16"),
    ("tp2 x pp2", "one process", "rpe", "fp32"),
    pytest.param("dp4 zero3", "dp4 zero1", "neox", "fp32", marks=pytest.mark.more),
    pytest.param("tp2 x pp2", "tp4", "neox", "fp32", marks=pytest.mark.more),
    pytest.param("dp4 zero1", "dp4 zero3", "neox", "fp32", marks=pytest.mark.product),
    pytest.param("tp2 x pp2", "dp4", "neox", "fp32", marks=pytest.mark.more),
    pytest.param("tp2 x pp2", "pp4", "rpe", "fp32", marks=pytest.mark.more),
    *(
        pytest.param(*cell, marks=pytest.mark.product)
        for cell in (
            ("dp4 zero3", "tp2 x pp2", "neox", "fp32"),
            ("dp2 zero2", "dp2 x tp2 zero3", "neox", "bfloat16"),
            ("pp4", "dp2 x tp2 zero1", "neox", "fp32"),
            ("one process", "tp2 x pp2", "rpe", "fp32"),
            ("tp2 x pp2", "dp2 zero2", "lion", "fp32"),
            ("dp4 zero3", "dp2 x tp2 zero1", "lion", "bfloat16"),
        )
    ),
]
STEPS, SAVED = 6, 3
# fp32: sums in another order. bf16: rounded to 8 bits in every layout, so that one process against two shows
# as much.
TOLERANCE = {"fp32": 1e-5, "bfloat16": 1e-3}


def values(save: Path, layout: str, model: str, precision: str, **more: Any) -> dict[str, Any]:
    kv = {"num_kv_heads": 4} if "llama" in model else {}
    common = {"precision": precision, "train_micro_batch_size_per_gpu": 2, "train_iters": STEPS}
    schedule = {"lr_decay_style": "cosine", "warmup": 0.3, "min_lr": 1e-5, "checkpoint_factor": SAVED}
    return config(ADAMW, MODELS[model], LAYOUTS[layout][1], kv, common, schedule, {"save": str(save), **more})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run in one layout that went on to its end; it also left a checkpoint half way."""
    known: dict[tuple[str, str, str], Path] = {}

    def run(layout: str, model: str, precision: str) -> Path:
        key = (layout, model, precision)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("run") / "run"
            run_ranks(run_to_end, LAYOUTS[layout][0], values(known[key], *key), timeout=120)
        return known[key]

    return run


@pytest.mark.parametrize(("before", "after", "model", "precision"), CELLS)
def test_goes_on(
    before: str, after: str, model: str, precision: str, saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(before, model, precision)
    given = values(tmp_path / "on", after, model, precision, load=str(source), iteration=SAVED)
    run_ranks(run_to_end, LAYOUTS[after][0], given, timeout=120)
    through, on = losses(source), losses(tmp_path / "on")
    assert sorted(on) == list(range(SAVED + 1, STEPS + 1)), "it went on from the checkpoint"
    worst = max(abs(on[step] - through[step]) / through[step] for step in on)
    with capsys.disabled():
        print(f"\n  {before:16s} -> {after:16s} {model:12s} {precision:9s} loss {worst:.1e}", end=" ")
    assert worst <= TOLERANCE[precision]
    fresh = values(tmp_path / "fresh", after, model, precision, load=str(source), iteration=SAVED, no_load_optim=True)
    if precision == "fp32" and after in ("dp4", "one process", "pp4"):
        run_ranks(run_to_end, LAYOUTS[after][0], fresh, timeout=120)
        without = losses(tmp_path / "fresh")
        assert max(abs(without[step] - through[step]) / through[step] for step in on) > 1e-4, "or it proves little"


def test_files_are_the_same_from_any_zero_stage(tmp_path: Path) -> None:
    """After the first step: same gradients, so the same moments whoever kept them."""
    states_by_stage = []
    for stage in (0, 1, 2, 3):
        save = tmp_path / str(stage)
        given = values(save, "dp4", "neox", "fp32", **zero(stage), train_micro_batch_size_per_gpu=4)
        run_ranks(stop_after, 2, {**given, "checkpoint_factor": 1}, 1)
        files = OptimizerFiles(save / "global_step1").files
        states_by_stage.append({key: load_tensors(path) for key, path in sorted(files.items())})
    for other in states_by_stage[1:]:
        assert other.keys() == states_by_stage[0].keys()
        for key, states in states_by_stage[0].items():
            assert states.keys() == other[key].keys()
            for name, state in states.items():
                assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 1.0
                for what, value in state.items():
                    assert value.shape == other[key][name][what].shape
                    assert value.allclose(other[key][name][what], rtol=1e-4, atol=1e-9), (key, name, what)


def test_there_and_back_is_bit_equal(saved: Any, tmp_path: Path) -> None:
    """Loaded at ZeRO 3 and saved again at once, the state is the one that a same-layout resume would have
    had."""
    source = saved("dp4 zero1", "neox", "fp32")
    again = values(tmp_path / "z3", "dp4 zero3", "neox", "fp32", load=str(source), iteration=SAVED)
    run_ranks(save_at_once, 4, again)
    for key, path in OptimizerFiles(source / f"global_step{SAVED}").files.items():
        ours = load_tensors(OptimizerFiles(tmp_path / "z3" / f"global_step{SAVED}").files[key])
        theirs = load_tensors(path)
        assert ours.keys() == theirs.keys()
        assert all(bit_equal({0: ours[name]}, {0: theirs[name]}) for name in theirs)


def save_at_once(rank: int, world_size: int, given: dict[str, Any]) -> None:
    """For the pool: load, and write what was loaded."""
    from tests.training.runs import begin

    training = begin(given)
    training.checkpointer.save(training.progress)
    training.checkpointer.wait()


def old_run(rank: int, world_size: int, given: dict[str, Any]) -> None:
    """For the pool: three steps that write their state as DeepSpeed keeps it."""
    from megatron.training.checkpoint import writer as saving

    saving._by_parameter = lambda args: False
    stop_after(rank, world_size, given, SAVED)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("one process", marks=pytest.mark.more),
        "dp2 zero2",
        pytest.param("dp4 zero3", marks=pytest.mark.more),
    ],
)
def test_state_as_deepspeed_keeps_it(layout: str, tmp_path: Path) -> None:
    """Earlier checkpoints, and those of 8-bit Adam: the layout that wrote them goes on, another is told why
    not."""
    ranks = LAYOUTS[layout][0]
    given = values(tmp_path / "run", layout, "neox", "fp32", engine="deepspeed")
    run_ranks(old_run, ranks, given)
    assert not list((tmp_path / "run" / f"global_step{SAVED}").glob("optim_*"))
    with pytest.raises(AssertionError, match=r"pipe_parallel_size: 2 \(program\), but the run of \S+ had 1"):
        run_ranks(run_to_end, 4, values(tmp_path / "on", "tp2 x pp2", "neox", "fp32", load=str(tmp_path / "run")))
    with pytest.raises(AssertionError, match="DeepSpeed's, of one layout; go on with engine: deepspeed"):
        run_ranks(run_to_end, ranks, {**given, "engine": "native"})
    run_ranks(run_to_end, ranks, given)
    through = {**given, "save": str(tmp_path / "through")}
    run_ranks(run_to_end, ranks, through)
    assert losses(tmp_path / "run") == losses(tmp_path / "through")
