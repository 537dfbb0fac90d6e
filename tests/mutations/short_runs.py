"""Commands of most users, at tiny size in one process: train, save, go on, and convert. `generate.py` looks
at which lines this runs."""

from pathlib import Path
from typing import Any

from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf
from megatron.checkpointing.layout import find_checkpoint
from megatron.training import train
from tests.training.runs import LLAMA, begin, config

EXPERTS = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
}
RUNS: tuple[dict[str, Any], ...] = (
    {**LLAMA, "engine": "native", "hidden_dropout": 0.1, "warmup": 0.5, "lr_decay_style": "cosine", "min_lr": 1e-4},
    {**LLAMA, "engine": "deepspeed", "precision": "bfloat16", "zero_optimization": {"stage": 1}},
    {**LLAMA, **EXPERTS, "engine": "native", "reset_attention_mask": True, "reset_position_ids": True},
)
STEPS = 4


def train_and_convert(folder: Path) -> None:
    """Each of RUNS half its way, then to its end from its checkpoint; then to HuggingFace's format and
    back."""
    for number, changes in enumerate(RUNS):
        save = folder / str(number)
        values = config(
            changes, num_layers=2, train_iters=STEPS, save=str(save), checkpoint_factor=STEPS // 2, eval_iters=1,
            eval_interval=2, train_batch_size=4, gradient_accumulation_steps=2, load=str(save),
            index_cache_dir=str(folder / "maps"), exit_interval=STEPS // 2,
        )  # fmt: skip
        args = None
        for values["exit_interval"] in (STEPS // 2, None):
            training = begin(values)
            train(training)
            args = training.args
            training.engine.close()
        assert args is not None
        if args.moe_num_experts == 1:  # no family has these experts
            exported = folder / f"hf{number}"
            export_hf(find_checkpoint(save), args, exported, check=False)
            import_hf(HFFolder(exported), folder / f"back{number}")
