"""Small models under the training engine, for tests on ranks of the pool."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.model import layer_params
from megatron.mpu import unshard
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training.engine import Engine
from megatron.training.engine_choice import choose_engine
from megatron.training.parallelize import parallelize
from tests.model.stages import Weights, document_batch, groups_of, make_stage, random_weights, small
from tests.pool import run_ranks

LR = 0.5
DEEP: dict[str, Any] = {"num_layers": 4}
NEOX: dict[str, Any] = {**DEEP, "gpt_j_residual": True, "rotary_pct": 0.5}
NO_BIASES: dict[str, Any] = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
GATED: dict[str, Any] = {"activation": "swiglu", "intermediate_size": 48, "compat_ffn_width": "none"}
TIED_LLAMA: dict[str, Any] = {**DEEP, **NO_BIASES, **GATED, "norm": "rmsnorm", "num_kv_heads": 2}
LLAMA: dict[str, Any] = {**TIED_LLAMA, "no_weight_tying": True}
ALIBI: dict[str, Any] = {**DEEP, "pos_emb": "alibi"}
LEARNED: dict[str, Any] = {**DEEP, "pos_emb": "learned"}
RPE: dict[str, Any] = {**DEEP, "pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 10}
WINDOW: dict[str, Any] = {**DEEP, "pos_emb": "sinusoidal", "sliding_window_width": 3}
EVERY_OTHER: dict[str, Any] = {"sliding_window_width": 3, "layer_types": ["sliding_attention", "full_attention"]}
QK_NORMS: dict[str, Any] = {"use_qk_layernorm": True, "use_separate_qk_norms": True, "qk_norm_per_head": True}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}
# Layers of every kind, and norms wherever one can stand.
GEMMA: dict[str, Any] = {
    **TIED_LLAMA, **EVERY_OTHER, **QK_NORMS, "activation": "geglu_tanh", "head_dim": 16, "zero_centered_gamma": True,
    "norm_placement": "sandwich", "rope_local_base_freq": 100.0, "no_rope_layers": [1, 1, 0, 1],
    "query_pre_attn_scalar": 11, "embedding_multiplier": 3.0,
}  # fmt: skip
# Blocks that differ in all that a list can say.
MIXED: dict[str, Any] = {
    **TIED_LLAMA, "num_kv_heads": [2, 4], "intermediate_size": [48, 48, 32], "sliding_window_width": 3,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "no_rope_layers": [1, 0, 0, 1], "attention_config": [[["flash"], 2], [["global"], 2]],
    "attention_output_gate": True,
}  # fmt: skip
# What single families have, all at once.
OPTIONS: dict[str, Any] = {
    **DEEP, **NO_BIASES, "norm": "layernorm", "use_bias_in_norms": False, "gpt_j_residual": True, "gpt_j_tied": True,
    "activation": "xielu", "num_kv_heads": 2, "add_qkv_bias": True, "clip_qkv": 0.8, "rotary_pct": 0.5,
    "rotary_interleaved": True, "rope_scaling": {**YARN, "llama_4_scaling_beta": 0.3}, "attention_multiplier": 0.7,
    "attn_logit_softcapping": 0.6, "final_logit_softcapping": 1.5, "residual_multiplier": 0.4, "logit_scale": 1.3,
}  # fmt: skip
# What gpt-oss has beside its experts.
SINKS: dict[str, Any] = {**DEEP, **GATED, **EVERY_OTHER, "norm": "rmsnorm", "num_kv_heads": 2, "no_weight_tying": True,
                         "head_dim": 16, "attention_sinks": True,
                         "rope_scaling": {**YARN, "truncate": False}}  # fmt: skip
# Experts in some blocks. Losses that balance them depend on rows: tests/training/test_experts.py.
MOE: dict[str, Any] = {**LLAMA, "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk",
                       "moe_layer_freq": [0, 1, 1, 1], "moe_intermediate_size": 32,
                       "moe_shared_expert_intermediate_size": 16, "norm_topk_prob": True}  # fmt: skip
# DeepSeek V3's attention, with biases.
LATENT: dict[str, Any] = {
    **DEEP, **GATED, "norm": "rmsnorm", "use_bias_in_mlp": False, "no_weight_tying": True, "kv_lora_rank": 12,
    "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "rotary_interleaved": True,
    "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"neox": NEOX, "llama": LLAMA, "alibi": ALIBI, "learned": LEARNED, "rpe": RPE,
                                     "window": WINDOW, "gemma": GEMMA, "mixed": MIXED, "options": OPTIONS, "moe": MOE,
                                     "sinks": SINKS, "latent": LATENT}  # fmt: skip
SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": LR}}, "gradient_clipping": 0.0,
                       "weight_decay": 0.0, "train_micro_batch_size_per_gpu": 2,
                       "gradient_accumulation_steps": 2}  # fmt: skip


class Step(NamedTuple):
    """One rank's view of one optimizer step. logprobs: before it; weights: after it, this rank's part."""

    loss: Tensor
    logprobs: list[Tensor]
    tensor_rank: int
    weights: Weights


def engine_for(values: dict[str, Any], world_size: int) -> Engine:
    args = small(**SGD, **values).for_world(world_size)
    groups = groups_of(args, world_size)
    stage, engine = make_stage(args, groups=groups), choose_engine(args).load()
    return parallelize(stage, LANGUAGE_MODELLING, args, groups, engine)


def sgd_steps(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[Step]:
    """For the pool: of every configuration one SGD step over two micro-batches of documents."""
    results = []
    for values in configs:
        engine = engine_for(values, world_size)
        batches = [document_batch(engine.args, seed=seed) for seed in (1, 2)]
        logprobs = engine.token_logprobs(batches)
        loss = engine.train_step(batches, LR).loss
        results.append(Step(loss.detach(), logprobs, engine.groups.rank("tensor"), engine.weights()))
        engine.close()
    return results


def full_weights(args: NeoXArgs, parts: Sequence[Any]) -> Weights:
    """The ranks' `weights` put together by `tensor_rank`; copies (data ranks', a tied head's) are equal."""
    weights: Weights = {}
    for layer, specs in layer_params(args).items():
        weights[layer] = {}
        for spec in specs:
            rank_values: dict[int, Tensor] = {}
            for part in parts:
                value = part.weights.get(layer, {}).get(spec.name)
                if value is not None:
                    held = rank_values.setdefault(part.tensor_rank, value)
                    assert held.equal(value), f"copies of {layer}.{spec.name} differ"
            if rank_values or not args.quantized:  # else it is held packed
                weights[layer][spec.name] = unshard([rank_values[rank] for rank in sorted(rank_values)], spec)
    return weights


def assert_steps(cells: Sequence[tuple[dict[str, Any], Step]], world_size: int, steps: Any = sgd_steps) -> None:
    """Each configuration makes, on `world_size` ranks, the step of one process. Losses and
    log-probabilities on every rank, and the weights' gradients, agree to fp32 rounding."""
    rank_steps = run_ranks(steps, world_size, [values for values, _ in cells])
    for (values, reference), *actual_steps in zip(cells, *rank_steps, strict=True):
        args = small(**{**values, "model_parallel_size": 1, "pipe_parallel_size": 0})
        for part in actual_steps:
            torch.testing.assert_close(part.loss, reference.loss, rtol=1e-5, atol=0)
            torch.testing.assert_close(part.logprobs, reference.logprobs, rtol=1e-5, atol=2e-5)
        initial, expected = random_weights(args), full_weights(args, [reference])
        for layer, tensors in full_weights(args, actual_steps).items():
            for name, actual in tensors.items():
                gradient = initial[layer][name] - expected[layer][name]
                difference = (actual - expected[layer][name]).norm()
                assert gradient.norm() > 1e-6, f"{layer} {name} did not move"
                # The step is a small change of a larger weight, which rounds it to about 1e-7 of that.
                allowed = 1e-5 * gradient.norm() + 1e-7 * initial[layer][name].norm()
                assert difference <= allowed, f"{layer} {name}: {difference} of {gradient.norm()}"
