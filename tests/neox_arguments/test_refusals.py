"""Some values resolve, but a run refuses them before its first step."""

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from tests.neox_arguments.conftest import MODEL, TRAINABLE, message_states, problems_of

CASES = [
    ({"attention_config": [[["local"], 2]]}, "attention_config", "local DeepSpeed"),
    ({"attention_config": [[["rwkv"], "all"]]}, "attention_config", "ea7aefd8"),
    ({"attention_config": ["rwkv", "flash"]}, "attention_config", "RWKV"),
    ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "optimizer.type", "use Adam"),
    ({"optimizer": {"type": "sm3", "params": {"lr": 1}}}, "optimizer.type", "sm3"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
     "zero_optimization.offload_param.device", "cpu"),
    ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients", "remove"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler", "profile true"),
    ({"use_mup": True}, "use_mup", "not built"),
    ({"amp": {"enabled": True}}, "amp", "bf16 enabled"),
    ({"s3_path": "s3://x"}, "s3_path", "save s3://BUCKET/FOLDER remove"),
    ({"deepspeed": False}, "deepspeed", "engine native"),
    ({"norm_placement": "post"}, "norm_placement", "fork pre"),
    ({"soft_prompt_tuning": {"enabled": True}}, "soft_prompt_tuning", "not built"),
]  # fmt: skip


@pytest.mark.parametrize("values, path, facts", CASES)
def test_a_run_refuses_what_resolves(values, path, facts):
    args = NeoXArgs.from_dict(MODEL | TRAINABLE | values)
    assert path in args.refusals() and message_states(args.refusals()[path], f": {facts}")
    with pytest.raises(ConfigError, match=f"^program: {path}: "):
        args.check_training()


@pytest.mark.parametrize("values", [
    {"te_mha": True, "te_columnparallel": True, "te_backend": "native"},
    {"te_mha": True, "te_layernorm_mlp": True, "te_columnparallel": True, "te_rowparallel": True},
    {"te_fp8_format": "e4m3", "te_fp8_wgrad": False, "te_fp8_margin": 2, "te_fp8_amax_history_len": 4},
    {"te_fp8_amax_compute_algo": "max", "te_fp8_mha": False, "data_types": {"grad_accum_dtype": "bf16"}},
    {"amp": {"enabled": False}, "elasticity": None, "sparsity_config": {}},
    {"soft_prompt_tuning": {"enabled": False}, "moe_num_experts": 1, "te_fp8_format": "hybrid"},
    {"curriculum_learning": {"enabled": False}},
])  # fmt: skip
def test_what_is_switched_off_or_default_is_not_refused(values):
    assert NeoXArgs.from_dict(MODEL | TRAINABLE | values).check_training().refusals() == {}


def test_every_refused_or_later_key_is_refused_by_name():
    """Each with a value of its type that is not its default; the reason says what to do."""
    samples = {bool: True, int: 7, float: 0.75, str: "text"}
    num_tried = 0
    for name, key in keys_of(NeoXArgs).items():
        if key.standing not in ("refused", "later"):
            continue
        for value in (samples.get(key.type), 7, 0.75, "text", ["a"], {"a": 1}, *key.choices, not key.default):
            try:
                args = NeoXArgs.from_dict(MODEL | {name: value})
            except ConfigError:
                continue
            if value is not None and value != key.default:
                assert name in args.refusals(), name
                num_tried += 1
                break
        else:
            pytest.fail(f"no value of {name} could be tried")
    assert num_tried >= 56


@pytest.mark.parametrize("values, facts", [
    ({"te_fp8_wgrad": False}, "te_fp8_wgrad: no effect precision_fp8 te_fp8_mha"),
    ({"te_fp8_margin": 1, "precision_fp8": "tensorwise", "precision": "bfloat16", "num_layers": 4},
     "te_fp8_margin: no effect precision_fp8 te"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "no effect: data_types.grad_accum_dtype fp32"),
    ({"te_mha": True, "te_layernorm_mlp": True}, "te_mha: te_layernorm_mlp"),
    ({"te_columnparallel": True}, "no effect: te_columnparallel"),
])  # fmt: skip
def test_what_is_taken_without_effect_or_chosen_is_said_in_one_line(values, facts):
    (line,) = NeoXArgs.from_dict(MODEL | TRAINABLE | values).check_training().startup_notes()
    assert message_states(line, facts) and "\n" not in line


@pytest.mark.parametrize(
    "key, facts", [("attention_type", "num_kv_heads"), ("decay_lr_to", "min_lr decay_lr_to optimizer.params.lr")]
)
def test_keys_that_gpt_neox_files_carry_and_nobody_knows(key, facts):
    (problem,) = problems_of({key: 0.1})
    assert message_states(problem, f"{key}: unknown key {facts}")


def test_very_many_problems_are_counted() -> None:
    problems = [f"a.yml:{line}: key_{line}: unknown key" for line in range(1, 71)]
    error = ConfigError(problems)
    assert str(error).splitlines() == [*problems[:50], "and 20 more problems"] and error.problems == tuple(problems)
