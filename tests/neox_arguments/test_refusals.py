"""What resolves, and is refused by a run before its first step."""

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of

TRAINABLE = {
    "train_iters": 1, "data_path": "d", "train_micro_batch_size_per_gpu": 1, "tokenizer_type": "CharLevelTokenizer",
}  # fmt: skip
CASES = [
    ({"attention_config": [[["local"], 2]]}, "attention_config", '"local" is refused: DeepSpeed\'s sparse attention'),
    ({"attention_config": [[["rwkv"], "all"]]}, "attention_config", "commit ea7aefd8 has it"),
    ({"attention_config": ["rwkv", "flash"]}, "attention_config", "RWKV is not here"),
    ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "optimizer.type", "use Adam"),
    ({"optimizer": {"type": "sm3", "params": {"lr": 1}}}, "optimizer.type", '"sm3" is refused: '),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.device",
        "write cpu",
    ),
    ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients", "remove it"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler", "profile: true traces"),
    ({"use_mup": True}, "use_mup", "MuP is not built yet"),
    ({"amp": {"enabled": True}}, "amp", "write bf16: {enabled: true}"),
    ({"s3_path": "s3://x"}, "s3_path", "save itself may be s3://BUCKET/FOLDER; remove it"),
    ({"deepspeed": False}, "deepspeed", "write engine: native instead"),
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
    {"te_mha": True, "te_layernorm_mlp": True, "te_columnparallel": True, "te_rowparallel": True},
    {
        "te_fp8_format": "e4m3",
        "te_fp8_wgrad": False,
        "te_fp8_margin": 2,
        "te_fp8_amax_history_len": 4,
        "te_fp8_amax_compute_algo": "max",
        "te_fp8_mha": False,
    },
    {"data_types": {"grad_accum_dtype": "bf16"}},
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
    assert tried >= 56


@pytest.mark.parametrize(
    "values, line",
    [
        ({"te_fp8_wgrad": False}, "te_fp8_wgrad (program) has no effect without precision_fp8 or te_fp8_mha"),
        (
            {"te_fp8_margin": 1, "precision_fp8": "tensorwise", "precision": "bfloat16", "num_layers": 4},
            "te_fp8_margin (program) has no effect without precision_fp8: te",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "no effect here: data_types.grad_accum_dtype (gradients are summed in fp32, in which small terms are not "
            "lost)",
        ),
        (
            {"te_mha": True, "te_layernorm_mlp": True},
            "te_mha and te_layernorm_mlp (program): our own layers, the same maths and names on disk",
        ),
        (
            {"te_columnparallel": True},
            "no effect here: te_columnparallel (our own linears have the same maths and names on disk)",
        ),
    ],
)
def test_what_is_taken_without_effect_or_chosen_is_said_in_one_line(model, values, line):
    assert NeoXArgs.from_dict(model | TRAINABLE | values).check_training().startup_notes() == [line]


@pytest.mark.parametrize(
    "key, advice",
    [
        ("attention_type", "unknown key; remove it, num_kv_heads says how many heads"),
        ("decay_lr_to", "unknown key; it is a fraction of lr; write min_lr: decay_lr_to x optimizer.params.lr"),
    ],
)
def test_keys_that_gpt_neox_files_carry_and_nobody_knows(model, key, advice):
    with pytest.raises(ConfigError, match=f"^program: {key}: {advice}"):
        NeoXArgs.from_dict(model | {key: 0.1})
