"""Resharding holds one layer in memory, however large the checkpoint."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import (
    Manifest,
    OptimizerFiles,
    ParallelLayout,
    begin_checkpoint,
    layer_file,
    load_weights,
    local_layer_state,
    model_file,
    model_keys,
    optimizer_file,
    publish,
    save_tensors,
    verify,
)
from megatron.model.weight_map import layer_params
from megatron.neox_arguments import NeoXArgs

CONFIG = {
    "num_layers": 24, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 64, "max_position_embeddings": 64,
    "padded_vocab_size": 1024, "norm": "layernorm", "pos_emb": "rotary", "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip
# One layer: weights in fp32, master and two moments, whole and cut, 2 x 4 x 4 bytes of 3.15 million
# parameters.
LAYER_BYTES = 2 * 4 * 4 * 12 * 512 * 512
PEAK = """
import sys
from tools.ckpts import reshard
import megatron.checkpointing  # what the command imports when it is asked for something
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
def now():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))
base = now()
reshard.main(sys.argv[1:])
print(peak() - base)
"""


def synthetic(save: Path) -> Path:
    """A checkpoint of 1.2 GB, as a run at tensor 1 would write it."""
    args = NeoXArgs.from_dict(CONFIG)
    temporary = begin_checkpoint(save, 7)
    records = []
    for layer, specs in layer_params(args).items():
        weights = {spec.name: torch.full(spec.shape, float(layer)) for spec in specs}
        for spec in specs:
            weights[spec.name].view(-1)[0] = 0.5
        state = local_layer_state(layer, weights, args, tensor_rank=0, tensor_size=1)
        moments = {name: {key: w * 2 for key in ("master", "exp_avg", "exp_avg_sq")} for name, w in weights.items()}
        records.append(save_tensors(state, temporary / layer_file(layer, 0)))
        records.append(save_tensors(moments, temporary / optimizer_file(layer, 0)))
    records.append(save_tensors({"iteration": 7}, temporary / model_file(0)))
    manifest = Manifest(
        run_id="r", iteration=7, consumed_samples=7, layout=ParallelLayout(1, 1, 1, 1, "bf16", 1),
        model=model_keys(args), seed=1, tokenizer=None, data={}, versions={}, created="", config=CONFIG,
        files={r.name: r for r in records},
    )  # fmt: skip
    return publish(temporary, save, 7, replace(manifest), {})


@pytest.mark.more
def test_peak_memory_is_about_a_layer(tmp_path: Path) -> None:
    source = synthetic(tmp_path / "from")
    size = sum(file.stat().st_size for file in source.iterdir() if file.is_file())
    assert size > 1.1e9 and size > 10 * LAYER_BYTES
    argv = ["--input_dir", str(source), "--output_dir", str(tmp_path / "to"), "--tp", "2"]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *argv], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.splitlines()[-1])
    print(f"{size / 1e9:.2f} GB checkpoint, {peak / 1e9:.2f} GB of memory")
    # Besides the layer: the pages of its files while they are mapped, and what the allocator keeps.
    assert peak < 2.5 * LAYER_BYTES < size / 4
    made = tmp_path / "to" / "global_step7"
    assert verify(made) is not None
    args = NeoXArgs.from_dict(CONFIG)
    for layer in (0, 5):
        one, other = (
            load_weights(path, args, layers=[layer], tensor_rank=0, tensor_size=1)[layer] for path in (source, made)
        )
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for spec in layer_params(args)[layer]:
            whole = OptimizerFiles(made).read(layer, spec, 0, 1)
            assert torch.equal(whole["exp_avg_sq"], one[spec.name] * 2)
