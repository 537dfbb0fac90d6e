"""Resharding holds one layer in memory, however large the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import Manifest, ParallelLayout, layer_file, model_file, model_keys, optimizer_file
from megatron.checkpointing.opening import verify
from megatron.checkpointing.optimizer_files import OptimizerFiles
from megatron.checkpointing.publish import begin_checkpoint, publish
from megatron.checkpointing.tensor_files import save_tensors
from megatron.checkpointing.weight_files import describe_checkpoint
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.golden import assert_same, full_weights
from tests.live_bytes import LiveBytes
from tools.ckpts import reshard

CONFIG: dict[str, Any] = {"num_layers": 24, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 64,
          "max_position_embeddings": 64, "padded_vocab_size": 128, "norm": "layernorm", "pos_emb": "rotary",
          "train_micro_batch_size_per_gpu": 1}  # fmt: skip
# Weights in fp32, master and two moments, each whole and cut.
LAYER_BYTES = 2 * 4 * 4 * 12 * 64 * 64


def synthetic(save: Path, config: dict[str, Any] = CONFIG) -> Path:
    """A checkpoint as a run at tensor 1 would write it."""
    args = NeoXArgs.from_dict(config)
    temporary = begin_checkpoint(save, 7)
    records = [save_tensors({"iteration": 7}, temporary / model_file(0))]
    for layer, specs in layer_params(args).items():
        weights = {spec.name: torch.full(spec.shape, float(layer)) for spec in specs}
        moments = {name: {key: w * 2 for key in ("master", "exp_avg", "exp_avg_sq")} for name, w in weights.items()}
        records.append(save_tensors(weights, temporary / layer_file(layer, 0)))
        records.append(save_tensors(moments, temporary / optimizer_file(layer, 0)))
    manifest = Manifest(run_id="r", iteration=7, consumed_samples=7, layout=ParallelLayout(1, 1, 1, 1, "bf16", 1),
                        model=model_keys(args), seed=1, tokenizer=None, data={}, versions={}, created="", config=config,
                        files={record.name: record for record in records})  # fmt: skip
    return publish(temporary, save, 7, manifest, {})


@pytest.mark.more
def test_peak_memory_is_about_a_layer(tmp_path: Path) -> None:
    source, resharded = synthetic(tmp_path / "from"), tmp_path / "to" / "global_step7"
    size = sum(file.stat().st_size for file in source.iterdir() if file.is_file())
    with LiveBytes() as live:
        reshard.main(["--input_dir", str(source), "--output_dir", str(tmp_path / "to"), "--tp", "2"])
    assert LAYER_BYTES / 2 < live.peak < 4 * LAYER_BYTES < size / 3  # with the storages of the files it reads
    assert verify(resharded) is not None
    args = NeoXArgs.from_dict(CONFIG)
    weights = full_weights(source, args)
    assert_same(full_weights(resharded, args), weights)
    for spec in layer_params(args)[5]:
        assert torch.equal(OptimizerFiles(resharded).read(5, spec, 0, 1)["exp_avg_sq"], weights[5][spec.name] * 2)


def test_names_are_those_of_every_block_of_a_hybrid(tmp_path: Path) -> None:
    """The first block, without MLP and attention, has the same names under all."""
    blocks = {"num_layers": 2, "attention_config": ["mamba2", "global"], "mamba_head_dim": 8, "activation": "swiglu"}
    source, resharded = synthetic(tmp_path / "from", {**CONFIG, **blocks}), tmp_path / "to" / "global_step7"
    command = ["--input_dir", str(source), "--output_dir", str(tmp_path / "to"), "--tp", "2", "--names"]
    reshard.main([*command, "llama"])
    assert "w1" in describe_checkpoint(resharded).names
    reshard.main([*command, "llama"])
    with pytest.raises(SystemExit, match="already exists"):
        reshard.main([*command, "neox"])
