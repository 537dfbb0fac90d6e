"""Checkpoints that GPT-NeoX wrote, as HuggingFace models: transformers gives GPT-NeoX's own logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron.checkpointing.families import hf_config, to_hf
from megatron.data import Batch
from megatron.neox_arguments import NeoXArgs
from tests.checkpointing.golden import RUNS, checkpoint, golden_args, whole
from tests.checkpointing.test_te_names import GATED, NATIVE, written
from tests.model.stages import Weights, random_weights, small, stage_with
from tests.model.test_golden_logits import TOLERANCE, fixed_input, golden_logits


@torch.no_grad()
def logits_as_hf(args: NeoXArgs, weights: Weights, tokens: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf_config(args)))
    # A file's embed_out is this version's lm_head.
    state = {name.replace("embed_out", "lm_head"): tensor for name, tensor in to_hf(args, weights.items())}
    problems = model.load_state_dict(state, strict=False)
    assert not problems.unexpected_keys and set(problems.missing_keys) <= {"lm_head.weight"}, problems
    model.tie_weights()
    return model.eval()(tokens).logits


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("run", RUNS)
def test_golden_logits(run: str, step: int) -> None:
    args = golden_args(run)
    assert hf_config(args)["model_type"] == ("llama" if run.startswith("llama") else "gpt_neox")
    logits = logits_as_hf(args, whole(checkpoint(run, step), args), fixed_input(run).tokens)
    torch.testing.assert_close(logits, golden_logits(run, step), **TOLERANCE)


@pytest.mark.parametrize(
    "keys",
    [{}, {"gpt_j_residual": True}, NATIVE, NATIVE | GATED | {"norm": "rmsnorm", "rms_norm_epsilon": 1e-8}],
    ids=["sequential", "parallel", "Transformer-Engine", "Transformer-Engine llama"],
)
def test_files_of_two_ranks(keys: dict[str, Any], tmp_path: Path) -> None:
    """Under gpt_j_residual they hold parts of a row-parallel bias, else copies (GPT-NeoX's converter adds
    both up)."""
    args = small(**keys)
    weights = random_weights(args)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = stage_with(args, weights)(None, Batch(tokens, tokens, torch.ones_like(tokens))).transpose(0, 1)
    logits = logits_as_hf(args, whole(written(tmp_path / "two", args, weights, 2), args), tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
