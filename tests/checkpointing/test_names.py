"""Other writers' names and layouts, made from golden tensors."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import layer_file, load_weights, model_file, save_tensors
from tests.checkpointing.golden import assert_same, checkpoint, fails, full_weights, golden_args, raw_layer

LAYERS = (0, 2, 3, 4, 5, 7, 8)
State = dict[str, Tensor]
TE = {"attention.query_key_value.": "attention.qkv.", "attention.dense.": "attention.proj.",
      "post_attention_layernorm.": "mlp.layer_norm_", "mlp.linear1.": "mlp.fc1_",
      "mlp.linear2.": "mlp.fc2_"}  # fmt: skip
LEGACY = {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."}


def renamed(state: State, table: dict[str, str]) -> State:
    for neox_name, foreign_name in table.items():
        state = {name.replace(neox_name, foreign_name): tensor for name, tensor in state.items()}
    return state


def te(state: State) -> dict:
    blobs = {"attention._extra_state": io.BytesIO(b"fp8"), "mlp._extra_state": torch.empty(0)}
    return {**renamed(state, TE), **(blobs if "attention.dense.weight" in state else {})}


def legacy(state: State) -> State:
    buffers = {"attention.rotary_emb.inv_freq": torch.ones(2), "attention.masked_bias": torch.ones(1)}
    return {**renamed(state, LEGACY), **(buffers if "attention.dense.weight" in state else {})}


def old_rows(qkv: Tensor, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> Tensor:
    """As GPT-NeoX's convert_raw_llama_weights_to_neox.py packs queries, keys and values beside w1, w2, w3."""
    q, k, v = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
    slices = int(head_dim * (kv_heads / heads))
    parts = [q.view(heads, head_dim, -1), k.view(heads, slices, -1), v.view(heads, slices, -1)]
    return torch.cat(parts, 1).flatten(0, 1)


@pytest.mark.parametrize("foreign", [te, legacy, dict])
@pytest.mark.parametrize("prefix", [None, "", "sequential."])
def test_layer_files_and_the_nested_layout_of_the_forks_converters(
    foreign: Callable, prefix: str | None, tmp_path: Path
) -> None:
    """Under foreign names. prefix: of names in the one file of a rank; None: files of layers."""
    run, args = "neox_pp2_mp2", golden_args("neox_pp2_mp2")
    for rank in (0, 1):
        states = {layer: foreign(raw_layer(run, layer, rank)) for layer in LAYERS}
        if prefix is None:
            for layer, state in states.items():
                save_tensors(state, tmp_path / layer_file(layer, rank))
            continue
        module = {f"{prefix}{layer}.{name}": t for layer, state in states.items() for name, t in state.items()}
        outer = {"module": {"module": module}, "optimizer": {}, "ds_version": "0.14.0", "iteration": 0}
        save_tensors(outer, tmp_path / model_file(rank))
    assert_same(full_weights(tmp_path, args), full_weights(checkpoint(run), args))
    local = load_weights(tmp_path, args, layers=[2], tensor_rank=3, tensor_size=4)
    assert_same(local, load_weights(checkpoint(run), args, layers=[2], tensor_rank=3, tensor_size=4))


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("neox_pp1_mp1"), tmp_path / "c")
    state = raw_layer("neox_pp1_mp1", 2)
    state["attention.proj.bias"] = torch.zeros(32)
    save_tensors(state, path / layer_file(2, 0))
    fails(r"attention\.dense\.bias", full_weights, path, golden_args("neox_pp1_mp1"))


def test_whole_tensors_in_every_rank_are_explained(tmp_path: Path) -> None:
    """The fork's converter at tp > 1 copies tensors whose Transformer-Engine names it does not know."""
    run = "neox_pp2_mp2"
    full = full_weights(checkpoint(run), golden_args(run))
    for rank in (0, 1):
        module = {f"{n}.{k}": t for n in LAYERS for k, t in te(full[n]).items()}
        save_tensors({"module": {"module": module}}, tmp_path / model_file(rank))
    fails("convert .* again for one tensor rank", full_weights, tmp_path, golden_args(run))
