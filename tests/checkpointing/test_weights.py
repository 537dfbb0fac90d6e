"""Golden weights at every tensor-parallel size, against the files as torch reads them."""

import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import layer_file, load_weights, local_layer_state, save_tensors
from megatron.model.weight_map import layer_params
from megatron.mpu import shard
from tests.checkpointing.golden import (
    RUNS,
    assert_same,
    checkpoint,
    fails,
    full_weights,
    golden_args,
    raw_layer,
    write_at,
)


def test_one_file_layout_equals_its_keys() -> None:
    run = "neox_pp0_mp1"
    raw = torch.load(checkpoint(run, 0) / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    weights = full_weights(checkpoint(run, 0), golden_args(run))
    flat = {f"sequential.{n}.{name}": t for n, tensors in weights.items() for name, t in tensors.items()}
    torch.testing.assert_close(flat, raw, rtol=0, atol=0)


def test_tensor_rank_gets_its_file() -> None:
    run, args = "neox_pp2_mp2", golden_args("neox_pp2_mp2")
    full = full_weights(checkpoint(run), args)
    for rank in (0, 1):
        local = load_weights(checkpoint(run), args, layers=[0, 3, 7, 8], tensor_rank=rank, tensor_size=2)
        for layer, tensors in local.items():
            raw = raw_layer(run, layer, rank)
            for spec in layer_params(args)[layer]:
                assert torch.equal(tensors[spec.name], shard(full[layer][spec.name], spec, rank, 2))
                if not spec.sum_over_tensor:
                    assert torch.equal(tensors[spec.name], raw[spec.name]), spec.name
    bias = "mlp.linear2.bias"
    parts = [raw_layer(run, 3, rank)[bias] for rank in (0, 1)]
    assert not torch.equal(parts[0] + parts[1], parts[0])
    assert torch.equal(full[3][bias], parts[0] + parts[1])


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("run", list(RUNS))
def test_there_and_back(run: str, size: int, tmp_path: Path) -> None:
    args = golden_args(run)
    written = write_at(tmp_path / "there", args, checkpoint(run), size)
    assert_same(full_weights(written, args), full_weights(checkpoint(run), args))
    back = write_at(tmp_path / "back", args, written, 2)
    assert_same(full_weights(back, args), full_weights(checkpoint(run), args))


def test_gated_rows_are_sharded_block_by_block(tmp_path: Path) -> None:
    run, args = "llama_pp1_mp1", golden_args("llama_pp1_mp1")
    up, gate = raw_layer(run, 2)["mlp.linear1.weight"].chunk(2)
    q, k, v = raw_layer(run, 2)["attention.query_key_value.weight"].split([32, 16, 16])
    local = load_weights(checkpoint(run), args, layers=[2], tensor_rank=1, tensor_size=2)[2]
    assert torch.equal(local["mlp.linear1.weight"], torch.cat([up[40:], gate[40:]]))
    assert torch.equal(local["attention.query_key_value.weight"], torch.cat([q[16:], k[8:], v[8:]]))


def test_biases_under_sequential_residual_are_copies() -> None:
    run, args = "neox_pp2_mp2", golden_args("neox_pp2_mp2", gpt_j_residual=False)
    weights = load_weights(checkpoint(run), args, layers=[2], tensor_rank=0, tensor_size=1)[2]
    assert torch.equal(weights["attention.dense.bias"], raw_layer(run, 2, 0)["attention.dense.bias"])
    state = local_layer_state(2, weights, args, tensor_rank=1, tensor_size=2)
    assert torch.equal(state["attention.dense.bias"], weights["attention.dense.bias"])


@pytest.mark.parametrize("size", [3, 6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_shares_sum_to_the_bias_exactly(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    shape = {"hidden_size": 84, "num_attention_heads": 42, "num_layers": 1, "attention_config": None}
    args = golden_args("neox_pp1_mp1", **shape, pos_emb="alibi")
    torch.manual_seed(size)
    specs = layer_params(args)[2]
    weights = {s.name: torch.randn(s.shape).to(dtype) for s in specs}
    for rank in range(size):
        local = {s.name: shard(weights[s.name], s, rank, size) for s in specs}
        state = local_layer_state(2, local, args, tensor_rank=rank, tensor_size=size)
        torch.testing.assert_close(state["mlp.linear2.bias"] * size, weights["mlp.linear2.bias"], rtol=0.04, atol=0)
        save_tensors(state, tmp_path / layer_file(2, rank))
        for layer in (0, 4, 5):
            save_tensors({}, tmp_path / layer_file(layer, rank))
    loaded = load_weights(tmp_path, args, layers=[2], tensor_rank=0, tensor_size=1)
    assert_same(loaded, {2: weights})


def test_layer_state_shares_no_memory() -> None:
    args = golden_args("neox_pp1_mp1")
    block = full_weights(checkpoint("neox_pp1_mp1"), args)[2]
    base = torch.zeros(1000)
    block["attention.dense.bias"] = base[:32]
    block["mlp.linear2.weight"] = block["mlp.linear2.weight"].t().contiguous().t()
    state = local_layer_state(2, block, args, tensor_rank=0, tensor_size=1)
    assert list(state) == list(raw_layer("neox_pp1_mp1", 2))
    for tensor in state.values():
        assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    fails(
        "layer 3: .*norm.weight.*needs", local_layer_state, 3, {"norm.weight": base}, args, tensor_rank=0, tensor_size=1
    )


def mappings(run: str) -> int:
    """Counts mappings of the checkpoint's files in this process; 0 where the system does not tell."""
    maps = Path("/proc/self/maps")
    return maps.read_text().count(str(checkpoint(run))) if maps.exists() else 0


@pytest.mark.parametrize("run", ["neox_pp1_mp1", "neox_pp0_mp1"])
def test_loaded_tensors_are_off_the_file(run: str) -> None:
    """Else one tensor would keep a whole file mapped."""
    args, mappings_before = golden_args(run), mappings(run)  # what other tests left is not ours
    for size in (1, 2):
        weights = load_weights(checkpoint(run), args, layers=[0, 2], tensor_rank=0, tensor_size=size)
        for tensor in (t for tensors in weights.values() for t in tensors.values()):
            assert tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        assert mappings(run) <= mappings_before


def test_only_the_asked_layers_are_opened(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("neox_pp2_mp2"), tmp_path / "c")
    for rank in (0, 1):
        (path / layer_file(5, rank)).write_bytes(b"not a tensor file")
    (path / layer_file(7, 1)).write_bytes(b"not a tensor file")
    args = golden_args("neox_pp2_mp2")
    assert set(load_weights(path, args, layers=[0, 1, 2, 3, 7], tensor_rank=0, tensor_size=2)) == {0, 1, 2, 3, 7}
    fails("layer_05-model_00", load_weights, path, args, layers=[5], tensor_rank=0, tensor_size=2)


def load_error(path: Path, run: str, **changes: object) -> str:
    return fails(".", full_weights, path, golden_args(run, **changes))


def test_every_missing_and_extra_tensor_is_named(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("neox_pp1_mp1"), tmp_path / "c")
    for layer, old_name, new in ((2, "attention.dense.bias", "lora_a"), (4, "mlp.linear1.weight", "mlp.router.weight")):
        state = raw_layer("neox_pp1_mp1", layer)
        state[new] = state.pop(old_name)
        save_tensors(state, path / layer_file(layer, 0))
    message = load_error(path, "neox_pp1_mp1")
    for word in ("attention.dense.bias", "lora_a", "mlp.linear1.weight", "mlp.router.weight", "layer_04-model_00"):
        assert word in message


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("neox_pp2_mp2"), tmp_path / "c")
    (path / layer_file(4, 1)).unlink()
    assert "layer_04-model_01-model_states.pt" in load_error(path, "neox_pp2_mp2")
    (path / layer_file(4, 0)).unlink()
    message = load_error(path, "neox_pp2_mp2")
    assert "missing layer 4" in message and "attention.query_key_value.weight" in message
    copy = shutil.copytree(checkpoint("neox_pp1_mp1"), tmp_path / "only")
    for file in copy.glob("layer_*"):
        file.unlink()
    assert "holds no weights" in load_error(copy, "neox_pp1_mp1")


@pytest.mark.parametrize(("changes", "words"), [
    ({"hidden_size": 64}, ["hidden_size: 32", "word_embeddings.weight", ", 32) in the file", ", 64)"]),
    ({"padded_vocab_size": 512}, ["set padded_vocab_size: 384", "final_linear.weight"]),
    ({"intermediate_size": 96}, ["mlp.linear1.weight", "intermediate_size"]),
    ({"num_kv_heads": 2}, ["attention.query_key_value.weight", "num_kv_heads"]),
    ({"num_layers": 6, "attention_config": None}, ["num_layers: 4", "missing layer 9"]),
    ({"num_layers": 2, "attention_config": None}, ["num_layers: 4", "extra layers 7 to 8"]),
    ({"no_weight_tying": False}, ["set no_weight_tying: true"]),
    ({"norm": "rmsnorm"}, ["input_layernorm.bias"]),
])  # fmt: skip
def test_wrong_shape_says_why(changes: dict, words: list[str]) -> None:
    for run in ("neox_pp1_mp1", "neox_pp2_mp2"):
        message = load_error(checkpoint(run), run, **changes)
        assert all(word in message for word in words), message
        assert len(message.splitlines()) < 15


def test_tied_checkpoint_into_untied_model(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("neox_pp1_mp1"), tmp_path / "c")
    (path / layer_file(8, 0)).unlink()
    assert "set no_weight_tying: false" in load_error(path, "neox_pp1_mp1")
    assert 8 not in full_weights(path, golden_args("neox_pp1_mp1", no_weight_tying=False))
