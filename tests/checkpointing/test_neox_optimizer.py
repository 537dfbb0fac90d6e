"""GPT-NeoX's optimizer state by parameter: golden files without ZeRO, and DeepSpeed's of them under ZeRO."""

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import CheckpointError, NeoXOptimizer, load_tensors, read_manifest, save_tensors, zero_file
from megatron.checkpointing.layout import model_file
from megatron.model.weight_map import layer_params, unused_params
from megatron.mpu import unshard
from tests.checkpointing.golden import checkpoint, fails, golden_args, written
from tests.checkpointing.test_names import te
from tests.checkpointing.test_te_names import GATED, NATIVE, OLMO3, TIED
from tests.marks import with_more
from tests.model.stages import random_weights, small
from tests.pool import run_ranks
from tests.training.runs import begin
from tests.training.test_golden_runs import goes_on, golden_config
from tools.ckpts import merge

# The layers of each pipeline stage, as GPT-NeoX cut them.
STAGES = {run: [range(9)] for run in ("neox_pp1_mp1", "neox_pp0_mp1", "llama_pp1_mp1")}
STAGES["neox_pp2_mp2"] = [range(4), range(4, 9)]


@pytest.mark.parametrize("run", STAGES)
def test_golden_state_is_found_by_parameter(run: str) -> None:
    args = golden_args(run)
    optimizer, specs = NeoXOptimizer(checkpoint(run), args), layer_params(args)
    assert optimizer.names(specs) == {(layer, spec.name) for layer in specs for spec in specs[layer]}
    size = optimizer.tensor_size
    for stage, layers in enumerate(STAGES[run]):
        files = [checkpoint(run) / model_file(stage * size + rank) for rank in range(size)]
        saved = [load_tensors(file)["optimizer"]["state"] for file in files]
        stage_params = [(layer, spec) for layer in layers for spec in specs.get(layer, ())]
        ordered = [
            layer_and_spec
            for decay in (True, False)
            for layer_and_spec in stage_params
            if layer_and_spec[1].weight_decay is decay
        ]
        assert len(ordered) == len(saved[0])
        for number, (layer, spec) in enumerate(ordered):
            state = optimizer.read(layer, spec, 0, 1)
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and float(state["step"]) == 3
            for key in ("exp_avg", "exp_avg_sq"):
                pieces = [saved[rank][number][key] for rank in range(size)]
                assert torch.equal(state[key], unshard(pieces, spec))
                assert torch.equal(optimizer.read(layer, spec, size - 1, size)[key], pieces[-1])
    assert optimizer.scaler() == {}
    initial = NeoXOptimizer(checkpoint(run, 0), args)
    assert all(initial.read(2, spec, 0, 1) == {} for spec in specs[2])


def zero_states(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """For the pool: what DeepSpeed saves of its ZeRO optimizer after a run has taken a checkpoint up."""
    training = begin(values)
    return training.engine.layout_state()


@pytest.mark.parametrize("stage", with_more([1, 2], 1))
def test_zero_files_of_deepspeed_hold_the_same(stage: int, tmp_path: Path) -> None:
    """Parameters stand across the cuts between data ranks, and padding at the end."""
    run, ranks = "neox_pp1_mp1", 3
    values = golden_config(
        "ckpt_neox", run, cache=str(tmp_path), load=str(checkpoint(run).parent), iteration=3, train_iters=5,
        train_batch_size=None, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1,
        zero_optimization={"stage": stage}, engine="deepspeed",
    )  # fmt: skip
    args = golden_args(run)
    path = copied(run, tmp_path, lambda rank, state: state.update(optimizer=None))
    for rank, saved in enumerate(run_ranks(zero_states, ranks, values)):
        save_tensors(saved, path / zero_file(rank, 0, False))
    zero, baseline = NeoXOptimizer(path, args), NeoXOptimizer(checkpoint(run), args)
    for layer, specs in layer_params(args).items():
        for spec in specs:
            torch.testing.assert_close(zero.read(layer, spec, 0, 1), baseline.read(layer, spec, 0, 1), rtol=0, atol=0)
    (path / zero_file(1, 0, False)).unlink()
    fails("incomplete: .*mp_rank_00", NeoXOptimizer, path, args)


# The modules of a block of GPT-NeoX, of Transformer-Engine and of the fork's OLMo, in the order in which they
# are registered, each with its parameters.
_TE_MLP = "layer_norm_weight {}fc1_weight fc1_bias fc2_weight fc2_bias"
REGISTERED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Transformer-Engine": (NATIVE | {"gpt_j_residual": True}, {
        "input_layernorm": "weight bias", "attention.qkv": "weight bias", "attention.proj": "weight bias",
        "mlp": _TE_MLP.format("layer_norm_bias "),
    }),
    "Transformer-Engine, gated, grouped queries": (NATIVE | GATED | {"norm": "rmsnorm"}, {
        "input_layernorm": "scale", "attention.qkv": "weight bias", "attention.proj": "weight bias",
        "mlp": _TE_MLP.format(""),
    }),
    "OLMo": (OLMO3 | {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}, {
        "input_layernorm": "scale", "attention.q_norm": "scale", "attention.k_norm": "scale",
        "attention.query_key_value": "weight", "attention.dense": "weight", "post_attention_layernorm": "scale",
        "post_feedforward_layernorm": "scale", "mlp.linear1": "weight", "mlp.linear2": "weight",
    }),
    "one norm": (TIED, {
        "input_layernorm": "weight bias", "attention.query_key_value": "weight bias", "attention.dense": "weight bias",
        "post_attention_layernorm": "weight bias", "mlp.linear1": "weight bias", "mlp.linear2": "weight bias",
    }),
}  # fmt: skip


def grouped(path: Path, block: Mapping[str, str]) -> list[list[tuple[str, Tensor]]]:
    """The parameters of all files in the two groups of GPT-NeoX's optimizer: those of norms, and all that are
    called `bias`, do not decay."""
    groups: list[list[tuple[str, Tensor]]] = [[], []]
    for file in sorted(path.glob("layer_*")):
        tensors = load_tensors(file)
        names = [f"{module}.{name}" for module, names in block.items() for name in names.split()]
        for name in names if "attention" in "".join(tensors) else tensors:
            module, _, last = name.rpartition(".")
            groups["norm" in module or last == "bias"].append((name, tensors[name]))
    return groups


def states_of(groups: list[list[tuple[str, Tensor]]], unused: Collection[str]) -> dict[str, Any]:
    """Without ZeRO: a parameter that got no gradient has no state."""
    named_tensors = [(name, tensor) for group in groups for name, tensor in group]
    state = {
        number: {"step": 3, "exp_avg": tensor * 2, "exp_avg_sq": tensor**2}
        for number, (name, tensor) in enumerate(named_tensors) if name not in unused
    }  # fmt: skip
    return {"state": state, "param_groups": [{"params": [0] * len(group)} for group in groups]}


def flat(groups: list[list[tuple[str, Tensor]]], rank: int) -> dict[str, Any]:
    """bf16 on two data ranks: the half of each group, the last with padding."""
    vectors = [torch.cat([tensor.flatten() for _, tensor in group]) for group in groups]
    paddings = [len(vector) % 2 for vector in vectors]
    halves = [torch.nn.functional.pad(v, (0, p)).chunk(2)[rank] for v, p in zip(vectors, paddings, strict=True)]
    base = {i: {"step": 3, "exp_avg": half * 2, "exp_avg_sq": half**2} for i, half in enumerate(halves)}
    return {"optimizer_state_dict": {
        "zero_stage": 1, "single_partition_of_fp32_groups": halves, "group_paddings": [p * rank for p in paddings],
        "base_optimizer_state": {"state": base, "param_groups": []},
    }}  # fmt: skip


_NEOX = {
    "input_layernorm": "weight bias", "attention.query_key_value": "weight bias", "attention.dense": "weight bias",
    "post_attention_layernorm": "weight bias", "mlp.linear1": "weight bias", "mlp.linear2": "weight bias",
}  # fmt: skip


def with_te_names(run: str, to: Path) -> Path:
    """A golden checkpoint of one rank as a run with te_mha and te_layernorm_mlp had written it: other names,
    and another order of the optimizer's state."""
    path = to / "global_step3"
    path.mkdir(parents=True)
    for file in checkpoint(run).glob("layer_*"):
        save_tensors(te(load_tensors(file)), path / file.name)
    (to / "latest").write_text(path.name)
    golden = [te({name: tensor}) for group in grouped(checkpoint(run), _NEOX) for name, tensor in group]
    order = [name for tensors in golden for name in tensors if "_extra_state" not in name]
    # A name comes once a block, in the order of blocks.
    numbers = {(name, order[:i].count(name)): i for i, name in enumerate(order)}
    groups = grouped(path, REGISTERED["Transformer-Engine"][1])
    names = [name for group in groups for name, _ in group]
    state = {**load_tensors(checkpoint(run) / model_file(0))}
    states = state["optimizer"]["state"]
    state["optimizer"] = {
        "state": {i: states[numbers[name, names[:i].count(name)]] for i, name in enumerate(names)},
        "param_groups": [{"params": [0] * len(group)} for group in groups],
    }
    save_tensors(state, path / model_file(0))
    return path


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "bf16"])
@pytest.mark.parametrize("kind", REGISTERED)
def test_state_of_other_modules_is_found_by_parameter(kind: str, zero: bool, tmp_path: Path) -> None:
    """A state that follows from the weights must be found beside them, with rows where theirs are."""
    keys, block = REGISTERED[kind]
    args = small(**keys)
    weights = random_weights(args)
    path = written(tmp_path / "global_step3", args, weights)
    groups = grouped(path, block)
    unused = {spec.name for spec in unused_params(args, 2)}
    save_tensors({"optimizer": None if zero else states_of(groups, unused)}, path / model_file(0))
    for rank in (0, 1) if zero else ():
        save_tensors(flat(groups, rank), path / zero_file(rank, 0, True))
    optimizer, specs = NeoXOptimizer(path, args), layer_params(args)
    assert optimizer.names(specs) == {(layer, spec.name) for layer in specs for spec in specs[layer]}
    for layer in specs:
        for spec in specs[layer]:
            weight, state = weights[layer][spec.name], optimizer.read(layer, spec, 0, 1)
            torch.testing.assert_close(state["exp_avg"], weight * 2, rtol=0, atol=0)
            torch.testing.assert_close(state["exp_avg_sq"], weight**2, rtol=0, atol=0)
            assert float(state["step"]) == 3


def copied(run: str, to: Path, change: Callable[[int, dict[str, Any]], None]) -> Path:
    """A golden checkpoint with other mp_rank files."""
    path = to / "global_step3"
    shutil.copytree(checkpoint(run), path)
    for rank, file in enumerate(sorted(path.glob("mp_rank_*"))):
        state = {**load_tensors(file)}
        change(rank, state)
        file.unlink()
        save_tensors(state, file)
    return path


def without_moment(rank: int, state: dict[str, Any]) -> None:
    state["optimizer"] = {**state["optimizer"], "state": {**state["optimizer"]["state"]}}
    state["optimizer"]["state"][0] = {"exp_avg": torch.zeros(1)}


@pytest.mark.parametrize(("change", "keys", "facts"), [
    (lambda rank, state: state.update(optimizer=None), {}, "as torch.optim saves"),
    (lambda rank, state: state.update(optimizer={"fp32_groups_flat": []}), {}, "as torch.optim saves"),
    (without_moment, {}, "exp_avg_sq"),
    (lambda rank, state: None, {"norm": "rmsnorm"}, "does not fit the parameters"),
], ids=["none", "fp16 without ZeRO", "no Adam", "another model"])  # fmt: skip
def test_what_is_no_state_of_this_model_is_refused_with_the_way_out(
    change: Callable[[int, dict[str, Any]], None], keys: dict[str, Any], facts: str, tmp_path: Path
) -> None:
    path, args = copied("neox_pp1_mp1", tmp_path, change), golden_args("neox_pp1_mp1", **keys)
    with pytest.raises(CheckpointError, match=f"{facts}.*no_load_optim: true"):
        NeoXOptimizer(path, args).read(0, layer_params(args)[0][0], 0, 1)


def test_a_run_goes_on_from_transformer_engines_names_as_from_gpt_neox(tmp_path: Path) -> None:
    """The second loss hangs on the moments. 1e-5: Transformer-Engine's gelu is an approximation."""
    run = "neox_pp1_mp1"
    path, values = with_te_names(run, tmp_path / "te"), golden_config("ckpt_neox", run, cache=str(tmp_path))
    golden = {**values, "load": str(checkpoint(run).parent), "iteration": 3, "train_iters": 5}
    renamed = {**golden, "load": str(path.parent), **NATIVE}
    expected, renamed_losses = goes_on(golden, 1, 2).losses, goes_on(renamed, 1, 2).losses
    assert renamed_losses == pytest.approx(expected, rel=1e-5)
    assert abs(goes_on({**renamed, "no_load_optim": True}, 1, 2).losses[1] - expected[1]) > 1e-4


def test_the_order_of_llama_conversions_is_refused(tmp_path: Path) -> None:
    """w1 and w3 are two parameters there."""
    path = copied("llama_pp1_mp1", tmp_path, lambda rank, state: None)
    for file in path.glob("layer_*"):
        tensors = {**load_tensors(file)}
        if (linear1 := tensors.pop("mlp.linear1.weight", None)) is not None:
            up, gate = linear1.chunk(2)
            tensors |= {"mlp.w3.weight": up, "mlp.w1.weight": gate, "mlp.w2.weight": tensors.pop("mlp.linear2.weight")}
        file.unlink()
        save_tensors(tensors, file)
    fails("w1, w2, w3.*no_load_optim: true", NeoXOptimizer, path, golden_args("llama_pp1_mp1"))


def test_merged_with_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = "neox_pp2_mp2"
    merge.main(["--input_dir", str(checkpoint(run)), "--output_dir", str(tmp_path)])
    path = tmp_path / "global_step3"
    manifest = read_manifest(path)
    assert manifest is not None and manifest.optimizer
    assert (manifest.iteration, manifest.consumed_samples) == (3, 12)
    assert "a run that loads it starts at iteration 0" not in capsys.readouterr().out
    args = golden_args(run)
    unmerged = NeoXOptimizer(checkpoint(run), args)
    for layer, specs in layer_params(args).items():
        if specs:
            file = load_tensors(path / f"optim_layer_{layer:02d}-model_00.pt")
            for spec in specs:
                expected = unmerged.read(layer, spec, 0, 1)
                assert all(torch.equal(file[spec.name][key], value) for key, value in expected.items())
