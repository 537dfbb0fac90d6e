"""Resolved values against those GPT-NeoX itself resolved from its shipped configurations (golden/configs)."""

import json
from pathlib import Path

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.declare import keys_of

FILE = json.loads((Path(__file__).parents[1] / "data/golden/configs/configs_eleuther.json").read_text())
GOLDEN = FILE["loaded"]
# What GPT-NeoX makes itself; not part of any file.
MADE = {
    "batch_size", "global_num_gpus", "is_pipe_parallel", "dynamic_loss_scale", "sparsity_config", "optimizer_type",
    "lr", "zero_stage", "zero_allgather_bucket_size", "zero_contiguous_gradients", "zero_reduce_bucket_size",
    "zero_reduce_scatter",
}  # fmt: skip
REFUSED = {
    "configs/finetuning_configs/6-9B.yml": "zero_optimization.load_from_fp32_weights: unknown key",
    "configs/gmlp_small.yml": 'optimizer.params.eps: expected float, got "1.0e_8"',
    "configs/gmlp_small.yml + configs/local_setup.yml": 'optimizer.params.eps: expected float, got "1.0e_8"',
    "configs/rwkv/170M.yml": 'attention_config: "rwkv" of GPT-NeoX is not built; use global or flash',
    "configs/rwkv/170M.yml + configs/local_setup.yml": 'attention_config: "rwkv" of GPT-NeoX is not built',
    "configs/sparse.yml + overlay": 'attention_config: "local" of GPT-NeoX is not built; use global or flash',
}


def written(name):
    """What the files said, as far as resolving can tell it apart: derived values are left out."""
    values = {key: value for key, value in GOLDEN[name]["values"].items() if key not in MADE}
    if "sample_input_file" not in values:
        del values["text_gen_type"]
    if "fp16" in values or "bf16" in values:
        del values["precision"]
    if {"train_batch_size", "train_micro_batch_size_per_gpu"} <= set(values):
        del values["train_batch_size"]
    return values


def in_scope():
    return [name for name in GOLDEN if set(written(name)) <= set(keys_of(NeoXArgs))]


def test_enough_configurations_are_in_scope():
    assert len(in_scope()) >= 34


@pytest.mark.parametrize("name", sorted(set(in_scope()) - set(REFUSED)))
def test_resolves_as_in_neox(name):
    entry, values = GOLDEN[name], GOLDEN[name]["values"]
    args = NeoXArgs.from_dict(written(name)).for_world(values["global_num_gpus"])
    assert args.params_dtype == {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[entry["params_dtype"][6:]]
    assert args.optimizer_name == values["optimizer_type"].lower()
    for key in ("lr", "zero_stage", "precision", "text_gen_type", "train_batch_size", "train_micro_batch_size_per_gpu"):
        assert getattr(args, key) == values[key], key
    assert args.gradient_accumulation_steps == values.get("gradient_accumulation_steps", 1)
    assert list(args.attention_config) == values["attention_config"]
    assert args.pp == values.get("pipe_parallel_size", 1)
    for section in ("zero_optimization", "fp16"):
        ours, theirs = getattr(args, section) or {}, entry["deepspeed_config"].get(section, {})
        assert {k: ours[k] for k in theirs if k in ours} == {k: v for k, v in theirs.items() if k in ours}
    for key in ("allgather_bucket_size", "contiguous_gradients", "reduce_bucket_size", "reduce_scatter"):
        assert args.zero_optimization[key] == values[f"zero_{key}"], key
    assert args.lr_decay_iters == values.get("lr_decay_iters", values["train_iters"])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_done_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict(written(name))
    assert any(REFUSED[name] in problem for problem in caught.value.problems)


def test_defaults_are_those_of_neox():
    """Where a default differs, it is on purpose."""
    theirs = FILE["defaults"]
    differs = {
        name
        for name, key in keys_of(NeoXArgs).items()
        if name in theirs and key.default != theirs[name]["default"] and not key.required
    }
    assert differs == {
        "data_impl",  # NeoX's `infer` never worked
        "distributed_backend",  # auto
        "gradient_accumulation_steps",  # unset, so that it can be derived
    }
