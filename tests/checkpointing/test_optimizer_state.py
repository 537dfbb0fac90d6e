"""NeoX's Adam state in torch's AdamW: golden ZeRO-0 files, and ZeRO-1 files in DeepSpeed's form."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron.checkpointing import (
    CheckpointError,
    load_tensors,
    sum_bias_masters,
    torch_adam_state,
    zero_adam_state,
)
from megatron.model.weight_map import layer_params
from tests.checkpointing.golden import checkpoint, golden_args


def shapes(run: str, layers: list[int], tensor_size: int) -> list[tuple[int, ...]]:
    specs = [s for n in layers for s in layer_params(golden_args(run)).get(n, ())]
    return [s.local_shape(tensor_size) for decay in (True, False) for s in specs if s.weight_decay is decay]


def optimizer_entry(run: str, rank: int, step: int = 3) -> Any:
    return load_tensors(checkpoint(run, step) / f"mp_rank_{rank:02d}_model_states.pt")["optimizer"]


@pytest.mark.parametrize(
    ("run", "rank", "layers", "size"),
    [
        ("neox_pp1_mp1", 0, list(range(9)), 1),
        ("neox_pp0_mp1", 0, list(range(9)), 1),
        ("llama_pp1_mp1", 0, list(range(9)), 1),
        ("neox_pp2_mp2", 1, [0, 2, 3], 2),
        ("neox_pp2_mp2", 2, [4, 5, 7, 8], 2),
    ],
)
def test_golden_state_loads_into_adamw(run: str, rank: int, layers: list[int], size: int) -> None:
    saved = optimizer_entry(run, rank)
    own = shapes(run, layers, size)
    state = torch_adam_state(saved, own, "f")
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in own]
    groups: list[dict[str, Any]] = [{"params": params[:9]}, {"params": params[9:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for i, param in enumerate(params):
        assert optimizer.state[param]["step"].item() == 3
        assert torch.equal(optimizer.state[param]["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_state_of_step_0_is_empty() -> None:
    assert torch_adam_state(optimizer_entry("neox_pp1_mp1", 0, 0), shapes("neox_pp1_mp1", list(range(9)), 1), "f") == {}


def test_other_layouts_are_refused_with_the_way_out() -> None:
    saved = optimizer_entry("neox_pp2_mp2", 0)
    for own in (shapes("neox_pp2_mp2", list(range(9)), 2), shapes("neox_pp2_mp2", [0, 2, 3], 1)):
        with pytest.raises(CheckpointError, match=r"mp_rank_00.*no_load_optim: true"):
            torch_adam_state(saved, own, "mp_rank_00")
    kinds: list[Any] = [None, {"fp32_groups_flat": []}]
    for wrong in kinds:
        with pytest.raises(CheckpointError, match="no_load_optim: true"):
            torch_adam_state(wrong, [], "f")
    del saved["state"][0]["exp_avg"]
    with pytest.raises(CheckpointError, match="not the state of Adam"):
        torch_adam_state(saved, shapes("neox_pp2_mp2", [0, 2, 3], 2), "f")


def fused_zero(sizes: list[int]) -> dict[str, Any]:
    """A ZeRO-1 entry as DeepSpeed writes it around its FusedAdam: one flat tensor a group."""
    numbered = range(len(sizes))
    return {
        "zero_stage": 1,
        "base_optimizer_state": {
            "state": {
                i: {"step": 7, "exp_avg": torch.ones(sizes[i]), "exp_avg_sq": torch.ones(sizes[i])} for i in numbered
            },
            "param_groups": [{"lr": 0.1, "step": 0, "bias_correction": True, "params": [i]} for i in numbered],
        },
        "single_partition_of_fp32_groups": [torch.zeros(n) for n in sizes],
        "group_paddings": [0] * len(sizes),
    }


def test_zero_state_loads_into_adamw() -> None:
    flat = [torch.nn.Parameter(torch.zeros(n)) for n in (12, 8)]
    own: list[dict[str, Any]] = [{"params": flat[:1], "weight_decay": 0.1}, {"params": flat[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(own, lr=0.3)
    groups = optimizer.state_dict()["param_groups"]
    saved = fused_zero([12, 8])
    new = zero_adam_state(saved, groups, [12, 8], "f")
    assert new["single_partition_of_fp32_groups"] is saved["single_partition_of_fp32_groups"]
    optimizer.load_state_dict(new["base_optimizer_state"])
    assert [optimizer.state[p]["step"].item() for p in flat] == [7, 7]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0] and optimizer.param_groups[0]["lr"] == 0.3
    for p in flat:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert "step" in saved["base_optimizer_state"]["param_groups"][0]  # the input is left alone


def test_elastic_zero_state_gets_its_padding_back() -> None:
    saved = fused_zero([12, 8])
    saved["base_optimizer_state"] = [{"exp_avg": torch.ones(n), "exp_avg_sq": torch.ones(n)} for n in (12, 5)]
    saved |= {"group_paddings": [0, 3], "base_optimizer_state_step": 4}
    state = zero_adam_state(saved, [{}, {}], [12, 8], "f")["base_optimizer_state"]["state"]
    assert state[1]["exp_avg"].tolist() == [1.0] * 5 + [0.0] * 3 and state[0]["step"].item() == 4


def test_zero_of_another_data_parallel_size_is_refused() -> None:
    for sizes in ([24, 8], [12]):
        with pytest.raises(CheckpointError, match="no_load_optim: true"):
            zero_adam_state(fused_zero([12, 8]), [{}] * len(sizes), sizes, "f")
    with pytest.raises(CheckpointError, match="no_load_optim: true"):
        zero_adam_state({}, [], [], "f")


@dataclass
class Address:
    numel: int
    start: int


def test_bias_masters_become_whole() -> None:
    def rank(value: float) -> dict[str, Any]:
        return {
            "single_partition_of_fp32_groups": [torch.full((4,), value), torch.full((6,), value)],
            "param_slice_mappings": [
                {"2.attention.dense.weight": Address(4, 0)},
                {
                    "2.input_layernorm.bias": Address(2, 0),
                    "2.attention.dense.bias": Address(2, 2),
                    "2.mlp.linear2.bias": Address(2, 4),
                },
            ],
        }

    ranks = [rank(1.0), rank(10.0)]
    masters = sum_bias_masters(ranks, 1, "f")["single_partition_of_fp32_groups"]
    assert masters[0].tolist() == [10.0] * 4 and masters[1].tolist() == [10.0, 10.0, 11.0, 11.0, 11.0, 11.0]
    assert ranks[1]["single_partition_of_fp32_groups"][1].tolist() == [10.0] * 6
