"""Sinusoidal and relative positions against transformers' own."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import T5Config
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.t5.modeling_t5 import T5Attention

from megatron.checkpointing import CheckpointError, layer_file, load_weights, local_layer_state, save_tensors
from megatron.model import build_stage, init_stage
from megatron.model.attention import AttentionInputs, AttentionOptions
from megatron.model.build_specs import attention_spec
from megatron.model.init import stage_parameters
from megatron.model.positions import RelativePositionBias, relative_bucket
from megatron.mpu import ParallelGroups
from tests.model.runs import RPE
from tests.model.stages import chosen, make_stage, random_batch, random_weights, small
from tests.model.test_attention import exact_attention

CPU = torch.device("cpu")


@torch.no_grad()
def test_sinusoids_are_added_to_embeddings() -> None:
    """GPT-J's."""
    args = small(pos_emb="sinusoidal")
    weights, batch = random_weights(args), random_batch(args)
    expected = weights[0]["word_embeddings.weight"][batch.tokens] + create_sinusoidal_positions(16, 32)
    positions = torch.arange(16).expand_as(batch.tokens)
    embedded = make_stage(args, weights).layers["0"](batch.tokens, positions, 0)
    torch.testing.assert_close(embedded.transpose(0, 1), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("buckets, furthest", [(32, 128), (8, 10), (6, 50)])
def test_buckets_are_t5s(buckets: int, furthest: int) -> None:
    distance = torch.arange(300)
    options = {"bidirectional": False, "num_buckets": buckets, "max_distance": furthest}
    expected = T5Attention._relative_position_bucket(-distance, **options)
    assert torch.equal(relative_bucket(distance, buckets, furthest), expected)
    assert int(expected.max()) == buckets - 1


def rpe_table(seed: int = 0) -> RelativePositionBias:
    table = RelativePositionBias(attention_spec(small(**RPE), 0).relative, ParallelGroups.single())  # type: ignore
    torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(seed))
    return table


def test_biases_are_t5s_times_the_root_of_head_dim() -> None:
    table = rpe_table()
    config = T5Config(d_model=32, d_kv=8, num_heads=4, relative_attention_num_buckets=8,
                      relative_attention_max_distance=10, is_decoder=True)  # fmt: skip
    reference = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    with torch.no_grad():
        reference.relative_attention_bias.weight.copy_(table.weight)
        expected = math.sqrt(8) * reference.compute_bias(20, 20)
        future = torch.ones(20, 20, dtype=torch.bool).triu(1)
        torch.testing.assert_close(table(20), expected.masked_fill(future, float("-inf")))
        columns = torch.tensor([[3], [19]])
        assert torch.equal(table(20, columns), table(20)[0, :, columns[:, 0]].transpose(0, 1).unsqueeze(2))


@pytest.mark.parametrize("name", ["auto", "math"])
def test_biases_get_their_gradient(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(10, 2, 4, 8, generator=generator) for _ in range(4))
    backend = chosen(small(**RPE, attention_backend=name))

    def gradient(out: Tensor, table: RelativePositionBias) -> Tensor:
        return torch.autograd.grad((out * weight).sum(), table.weight)[0]

    table32, exact = rpe_table(), rpe_table().double()
    actual = gradient(backend.attend(q, k, v, AttentionInputs(mask=table32(10)), AttentionOptions()), table32)
    expected = gradient(exact_attention(q, k, v, exact(10).double()), exact)
    assert actual[2:].abs().min() > 0
    torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-5)


def test_all_blocks_share_one_table() -> None:
    args = small(**RPE)
    stage = build_stage(args, ParallelGroups.single())
    init_stage(stage, args, ParallelGroups.single())
    name = "attention.rpe.weight"
    assert [layer for layer, n, _ in stage_parameters(stage) if n == name] == [2]
    copies = [param for _, n, param in stage_parameters(stage, copies=True) if n == name]
    assert len(copies) == args.num_layers and all(copy is copies[0] for copy in copies)
    assert abs(float(copies[0].detach().std()) - math.sqrt(2 / (8 + 4))) < 0.15  # xavier_normal


def test_a_checkpoint_with_another_table_in_each_stage_is_refused(tmp_path: Path) -> None:
    args = small(**{**RPE, "num_layers": 2, "no_weight_tying": True})
    weights = random_weights(args)
    for layer, tensors in weights.items():
        state = local_layer_state(layer, tensors, args, tensor_rank=0, tensor_size=1)
        save_tensors(state, tmp_path / layer_file(layer, 0))
    loaded = load_weights(tmp_path, args, layers=weights, tensor_rank=1, tensor_size=2)
    name = "attention.rpe.weight"
    assert all(torch.equal(loaded[layer][name], weights[2][name][:, 2:]) for layer in (2, 3))
    weights[3][name] = weights[3][name] + 1
    save_tensors(weights[3], tmp_path / layer_file(3, 0))
    with pytest.raises(CheckpointError, match=rf"layer 3: {name} .*layer 2"):
        load_weights(tmp_path, args, layers=[3], tensor_rank=0, tensor_size=1)
