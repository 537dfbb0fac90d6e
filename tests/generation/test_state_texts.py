"""Greedy text of Mamba and Mamba 2 against `transformers.generate`, with caches on both sides."""

from typing import Any

import pytest
import torch

from megatron.generation import Model, SamplingParams, complete, for_inference
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import CharLevelTokenizer
from tests.generation.batching.test_kv_cache import chunked
from tests.model.stages import Weights, stage_with

VOCAB, LAYERS, HIDDEN, TOKENS = 96, 3, 32, 40
PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 3, 20, 70)]
CLOSE = 1e-4  # two best logits nearer than this may change places
OURS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4, "norm": "rmsnorm", "rms_norm_epsilon": 1e-5,
    "pos_emb": "none", "no_weight_tying": True, "max_position_embeddings": 128, "seq_length": 16,
    "padded_vocab_size": VOCAB, "precision": "fp32",
}  # fmt: skip
THEIRS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 8}, {"mamba_state_dim": 8}),
    "mamba2": (
        "Mamba2",
        {"state_size": 8, "head_dim": 16, "num_heads": 4, "n_groups": 2, "chunk_size": 8},
        {"mamba_state_dim": 8, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_chunk_size": 8},
    ),
}


class Some(CharLevelTokenizer):
    vocab_size = VOCAB


def with_our_names(state: dict[str, torch.Tensor]) -> Weights:
    weights: Weights = {i: {} for i in (0, *range(2, LAYERS + 2), LAYERS + 3, LAYERS + 4)}
    weights[0]["word_embeddings.weight"] = state["backbone.embeddings.weight"]
    weights[LAYERS + 3]["norm.scale"] = state["backbone.norm_f.weight"]
    weights[LAYERS + 4]["final_linear.weight"] = state["lm_head.weight"]
    for name, value in state.items():
        if name.startswith("backbone.layers."):
            _, _, block, inner = name.split(".", 3)
            weights[int(block) + 2]["norm.scale" if inner == "norm.weight" else inner] = value
    return weights


@pytest.mark.parametrize("kind", CASES)
def test_greedy_text_equals_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    name, their_values, our_values = CASES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**THEIRS, **their_values)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # so that all of it matters, and the next token depends on more than the last
        for param in theirs.parameters():
            param.add_(0.2 * torch.randn(param.shape))
        theirs.get_input_embeddings().weight.mul_(4.0)
    args = for_inference(
        NeoXArgs.from_dict({**OURS, **our_values, "attention_config": [[[kind], LAYERS]]}).for_world(1)
    )
    stage = stage_with(args, with_our_names(theirs.state_dict()))
    ours = Model(args, ParallelGroups.single(), Some(), stage, torch.float32)
    with chunked(9):
        done = complete(
            ours, PROMPTS, SamplingParams(), maximum_tokens=TOKENS, seeds=range(len(PROMPTS)), stop_token_ids=(),
            maximum_rows=3,
        )  # fmt: skip
    assert max(len(set(one.tokens)) for one in done) > 8, "texts must be lively"
    for prompt, one in zip(PROMPTS, done, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0,
            use_cache=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        expected, best = out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).topk(2).values
        differing = [i for i in range(TOKENS) if one.tokens[i] != expected[i]]
        assert not differing or float(best[differing[0], 0] - best[differing[0], 1]) < CLOSE, (len(prompt), differing)
