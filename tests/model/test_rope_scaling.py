"""Scaled rotary positions: tables are those of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.data import Batch
from megatron.data.batch import Documents
from megatron.generation import Model, SamplingParams, complete, for_inference
from megatron.model.build_specs import rotary_spec
from megatron.model.positions import apply_rope, rope_frequencies, rope_tables
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import CharLevelTokenizer
from tests.model.stages import make_stage, small
from tests.model.test_transformers import SIZES

CPU = torch.device("cpu")
TRAINED = {"original_max_position_embeddings": 8}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    "llama3 wide": {
        "rope_type": "llama3", "factor": 2.5, "low_freq_factor": 0.5, "high_freq_factor": 9.0,
        "original_max_position_embeddings": 31,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    "yarn ramp": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.1, **TRAINED},
    "yarn between": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.1, "truncate": False, **TRAINED,
    },
    "yarn factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, **TRAINED},
    "yarn mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.6, **TRAINED},
}  # fmt: skip


def args_of(scaling: dict[str, Any], **changes: Any) -> NeoXArgs:
    """HuggingFace's dynamic knows no other first length than its max_position_embeddings."""
    trained = {"original_max_position_embeddings": 8} if scaling["rope_type"] == "dynamic" else {}
    values = {"max_position_embeddings": 32, "rotary_emb_base": 500, **changes}
    return small(rope_scaling={**scaling, **trained}, **values)


def config_of(scaling: dict[str, Any], **changes: Any) -> LlamaConfig:
    longest = 8 if scaling["rope_type"] == "dynamic" else 32
    rope = {**scaling, "rope_theta": 500.0}
    return LlamaConfig(**{**SIZES, "max_position_embeddings": longest, "rope_parameters": rope, **changes})


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [6, 20])
def test_tables_are_those_of_transformers(name: str, length: int, head_dim: int) -> None:
    scaling = SCALINGS[name]
    config = config_of(scaling, hidden_size=4 * head_dim)
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, CPU, seq_len=length)
    frequencies, own_factor = rope_frequencies(rotary_spec(args_of(scaling, hidden_size=4 * head_dim)), length, CPU)
    assert torch.equal(frequencies, expected) and own_factor == factor
    unscaled, _ = rope_frequencies(rotary_spec(small(rotary_emb_base=500, hidden_size=4 * head_dim)), length, CPU)
    assert torch.equal(frequencies, unscaled) == (name == "dynamic" and length == 6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["linear", "yarn factor"])
def test_a_rotation_is_a_product_of_complex_numbers(name: str, interleaved: bool) -> None:
    """The numbers are pairs of halves or of neighbours. YaRN scales them; later dimensions are unchanged."""
    spec = replace(rotary_spec(args_of(SCALINGS[name], hidden_size=64, rotary_pct=0.5)), interleaved=interleaved)
    positions, x = torch.tensor([[0, 1, 5, 6]]), torch.randn(4, 1, 2, 16, generator=torch.Generator().manual_seed(0))
    frequencies, factor = rope_frequencies(spec, 7, CPU)
    angles = (positions.t().unsqueeze(-1) * frequencies).unsqueeze(2)
    turning = x[..., :8].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    numbers = torch.complex(*turning.unbind(-1 if interleaved else -2)) * torch.polar(angles * 0 + factor, angles)
    turned = torch.stack([numbers.real, numbers.imag], -1 if interleaved else -2).flatten(-2)
    torch.testing.assert_close(apply_rope(x, rope_tables(spec, positions, 7)), torch.cat([turned, x[..., 8:]], -1))
    assert (factor != 1.0) == (name == "yarn factor")


def test_generation_with_dynamic_frequencies() -> None:
    """Every token is what a forward over its whole text says, whatever the rows beside it."""
    args = for_inference(args_of(SCALINGS["dynamic"], no_weight_tying=True))
    tokenizer, stage = CharLevelTokenizer(), make_stage(args)
    tokenizer.vocab_size = 64
    prompts = [[5, 3, 9], [7, 7, 7, 7, 7, 2, 10], [1]]
    model = Model(args, ParallelGroups.single(), tokenizer, stage, torch.float32)
    completions = complete(model, prompts, SamplingParams(), maximum_tokens=12, seeds=range(3))
    assert sum(len(row.tokens) for row in completions) > 20
    for prompt, row in zip(prompts, completions, strict=True):
        text = list(prompt)
        for token in row.tokens:
            tokens = torch.tensor([text])
            logits = stage(None, Batch(tokens, tokens, torch.ones_like(tokens)))
            assert int(logits[-1, 0].argmax()) == token  # type: ignore[index]
            text.append(token)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_documents_of_a_packed_row_rotate_as_in_rows_of_their_own(kind: str) -> None:
    """A long one and two short ones in a row, each with the frequencies of its own length."""
    longrope = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0],
                "original_max_position_embeddings": 8}  # fmt: skip
    scaling = longrope if kind == "longrope" else SCALINGS["dynamic"]
    args = args_of(scaling, hidden_size=16)
    stage, lengths = make_stage(args), [12, 5, 3]
    tokens = torch.randint(0, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    starts = torch.tensor([0, 12, 17, 20], dtype=torch.int32)
    packed = stage(None, Batch(tokens, tokens, torch.ones_like(tokens), positions, Documents(starts, 12)))
    unpacked = [stage(None, Batch(text, text, torch.ones_like(text))) for text in tokens.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(unpacked), rtol=1e-5, atol=1e-5)
