"""A run that stopped goes on bit for bit: saved at step 3, a new process, on to 6."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model.runs import MIXED
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, NEOX, bit_equal, config, run_to_end

AT_ONCE = {("tp2", "fp32"), ("pp2", "fp32"), ("zero3", "bfloat16")}
MORE = {("plain", "fp32"), ("zero1", "bfloat16"), ("zero2", "fp32"), ("pp2", "bfloat16")}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "neftune_noise_alpha": 5.0}


def losses(save: Path) -> dict[int, float]:
    """train/lm_loss by iteration; each step stands once."""
    rows = [json.loads(line) for line in (save / "logs" / "metrics.jsonl").read_text().splitlines()]
    step_losses = [(row["iteration"], row["train/lm_loss"]) for row in rows if "train/lm_loss" in row]
    assert len(step_losses) == len(dict(step_losses))
    return dict(step_losses)


RESUMED = [
    pytest.param(
        name, precision, "auto",
        marks=() if (name, precision) in AT_ONCE else pytest.mark.more if (name, precision) in MORE else
        pytest.mark.product,
    )
    for name in LAYOUTS if name != "dp2" for precision in ("fp32", "bfloat16")
]  # fmt: skip
BY_DEEPSPEED = [  # pipelines run on it above, the others on the native engine
    pytest.param(
        name, precision, "deepspeed",
        marks=pytest.mark.product if name == "plain" else pytest.mark.more,
    )
    for name, precision in (("plain", "fp32"), ("tp2", "fp32"), *((f"zero{i}", "bfloat16") for i in (1, 2, 3)))
]  # fmt: skip


@pytest.mark.parametrize(("name", "precision", "engine"), RESUMED + BY_DEEPSPEED)
def test_bit_equal(name: str, precision: str, engine: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    layout = {**layout, "engine": engine}
    model = LLAMA if name == "tp2" else NEOX
    common = config(
        model, ADAMW, DROPOUT, layout, precision=precision, train_micro_batch_size_per_gpu=2, train_iters=6,
        lr_decay_style="cosine", warmup=0.3, min_lr=1e-5, no_weight_tying=name != "pp2", checkpoint_factor=3,
    )  # fmt: skip
    assert_goes_on(ranks, common, tmp_path)


@pytest.mark.parametrize(
    ("tensor", "pipe"), [(2, 2), *(pytest.param(*sizes, marks=pytest.mark.more) for sizes in ((2, 1), (1, 2)))]
)
def test_bit_equal_where_blocks_differ(tensor: int, pipe: int, tmp_path: Path) -> None:
    common = config(
        MIXED, ADAMW, pos_emb="rotary", precision="bfloat16", train_micro_batch_size_per_gpu=2, train_iters=6,
        checkpoint_factor=3, model_parallel_size=tensor, pipe_parallel_size=pipe,
    )  # fmt: skip
    assert_goes_on(tensor * pipe, common, tmp_path)


HYBRID = {
    "num_layers": 4, "attention_config": ["mamba2", "attention", "mamba", "mlp"], "mamba_head_dim": 8,
    "mamba_num_groups": 2, "mamba_state_dim": 8, "mamba_chunk_size": 8, "norm": "rmsnorm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        ("zero2", "native"),
        pytest.param("plain", "native", marks=pytest.mark.product),
        *(pytest.param(name, "native", marks=pytest.mark.more) for name in ("zero1", "zero3", "tp2")),
        *(pytest.param(name, "deepspeed", marks=pytest.mark.more) for name in ("zero1", "zero3", "tp2", "pp2")),
    ],
)
def test_bit_equal_with_states(layout: str, engine: str, tmp_path: Path) -> None:
    """Mamba's blocks, packed rows, A_log and D in fp32 beside bf16."""
    ranks, keys = LAYOUTS[layout]
    common = config(
        HYBRID, ADAMW, keys, pos_emb="rotary", precision="bfloat16", train_micro_batch_size_per_gpu=2, train_iters=6,
        checkpoint_factor=3, engine=engine, reset_attention_mask=True, reset_position_ids=True,
    )  # fmt: skip
    assert_goes_on(ranks, common, tmp_path)


def assert_goes_on(ranks: int, common: dict[str, Any], tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    whole = run_ranks(run_to_end, ranks, {**common, "save": str(through)})
    stopped = {**common, "save": str(resumed), "load": str(resumed)}
    run_ranks(stop_after, ranks, stopped, 3)
    assert sorted(p.name for p in resumed.glob("global_step*")) == ["global_step3"]
    went_on = run_ranks(run_to_end, ranks, stopped)
    assert losses(resumed) == losses(through)
    assert len(losses(resumed)) == 6
    assert all(bit_equal(a[1], b[1]) for a, b in zip(whole, went_on, strict=True))


def stop_after(rank: int, world_size: int, values: dict[str, Any], steps: int) -> None:
    """For the pool: the run ends without warning right after the save at `steps`."""
    from megatron.training import train
    from megatron.training.callbacks.saving import SaveCallback
    from tests.training.runs import begin

    class Stop(Exception):
        pass

    training = begin(values)
    save = SaveCallback.save

    def save_and_stop(self: SaveCallback, ephemeral: bool = False) -> None:
        save(self, ephemeral)
        if training.progress.iteration == steps:
            training.checkpointer.wait()
            raise Stop

    SaveCallback.save = save_and_stop  # type: ignore[method-assign] # this process is the pool's throw-away fork
    try:
        train(training)
    except Stop:
        return
    raise AssertionError("the run did not come to the step")
