"""What resolves, and is refused by a run before its first step."""

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.declare import keys_of

TRAINABLE = {
    "train_iters": 1, "data_path": "d", "train_micro_batch_size_per_gpu": 1, "tokenizer_type": "CharLevelTokenizer",
}  # fmt: skip
CASES = [
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "write fp32"),
    ({"attention_config": [[["local"], 2]]}, "attention_config", '"local" is refused: DeepSpeed\'s sparse attention'),
    ({"attention_config": [[["rwkv"], "all"]]}, "attention_config", "commit ea7aefd8 has it"),
    ({"attention_config": ["mamba", "flash"]}, "attention_config", "Mamba is not built yet"),
    ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "optimizer.type", "use Adam"),
    ({"optimizer": {"type": "sm3", "params": {"lr": 1}}}, "optimizer.type", '"sm3" is refused: '),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.device",
        "write cpu",
    ),
    ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients", "remove it"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler", "profile: true traces"),
    ({"train_impl": "REINFORCE"}, "train_impl", "training with rewards is not built yet"),
    ({"moe_num_experts": 8}, "moe_num_experts", "mixture of experts is not built yet"),
    ({"amp": {"enabled": True}}, "amp", "write bf16: {enabled: true}"),
    ({"te_mha": True}, "te_mha", "add the line `te_backend: native`"),
    ({"te_layernorm_mlp": True}, "te_layernorm_mlp", "add the line `te_backend: native`"),
    ({"te_fp8_wgrad": False}, "te_fp8_wgrad", "FP8 is not built yet"),
    ({"ga_dataset": "x"}, "ga_dataset", "unlearning is not built yet"),
    ({"s3_path": "s3://x"}, "s3_path", "save itself may be s3://BUCKET/FOLDER; remove it"),
    ({"deepspeed": False}, "deepspeed", "there is no other engine"),
    ({"norm_placement": "post"}, "norm_placement", "the geodesic fork trained pre under this name"),
    ({"soft_prompt_tuning": {"enabled": True}}, "soft_prompt_tuning", "not built yet"),
]


@pytest.mark.parametrize("values, path, message", CASES)
def test_a_run_refuses_what_resolves(model, values, path, message):
    args = NeoXArgs.from_dict(model | TRAINABLE | values)
    assert path in args.refusals() and message in args.refusals()[path]
    with pytest.raises(ConfigError, match=f"^program: {path}: "):
        args.check_training()


OFF = [
    {"te_mha": True, "te_columnparallel": True, "te_backend": "native"},
    {"amp": {"enabled": False}, "elasticity": None, "sparsity_config": {}},
    {"soft_prompt_tuning": {"enabled": False}, "moe_num_experts": 1, "te_fp8_format": "hybrid"},
    {"curriculum_learning": {"enabled": False}},
]


@pytest.mark.parametrize("values", OFF)
def test_what_is_switched_off_or_default_is_not_refused(model, values):
    assert NeoXArgs.from_dict(model | TRAINABLE | values).check_training().refusals() == {}


def test_every_refused_or_later_key_is_refused_by_name(model):
    """Each with a value of its type that is not its default; the reason says what to do."""
    samples = {bool: True, int: 7, float: 0.75, str: "text"}
    tried = 0
    for name, key in keys_of(NeoXArgs).items():
        if key.standing not in ("refused", "later"):
            continue
        for value in (samples.get(key.type), 7, 0.75, "text", ["a"], {"a": 1}, *key.choices, not key.default):
            try:
                args = NeoXArgs.from_dict(model | {name: value})
            except ConfigError:
                continue
            if value is not None and value != key.default:
                assert name in args.refusals(), name
                tried += 1
                break
        else:
            pytest.fail(f"no value of {name} could be tried")
    assert tried > 80
