"""The frozen object: read-only, complete through JSON, changed only by making a new one."""

import copy
import dataclasses
import json
import operator
import pickle
import re

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.reports.config_dump import print_config
from tests.neox_arguments.conftest import MODEL, TEXT, message_states


@pytest.fixture
def args(model):
    return NeoXArgs.from_dict(model | {"optimizer": {"params": {"lr": 0.1}}, "extra_save_iters": [1, 2], "save": "x"})


def test_nothing_can_be_written(args):
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 1
    for write in (
        lambda: operator.setitem(args.optimizer["params"], "lr", 1),
        lambda: args.zero_optimization.update(stage=1),
        lambda: args.user_values["optimizer"]["params"].pop("lr"),
    ):
        with pytest.raises(TypeError, match="read-only"):
            write()
    with pytest.raises(AttributeError):
        args.extra_save_iters.append(3)


def test_what_was_passed_in_can_change_afterwards(model):
    section: dict = {"type": "Adam", "params": {"lr": 0.1}}
    args = NeoXArgs.from_dict(model | {"optimizer": section})
    section["params"]["lr"] = 9
    assert args.lr == 0.1 and args.replace(seed=1).lr == 0.1


def test_replace_makes_a_new_resolved_object(args):
    changes = {"optimizer.params.lr": 0.2, "zero-optimization.stage": 1}
    replaced = args.replace(train_iters=50, lr_decay_fraction=0.5, **changes)
    assert (replaced.lr_decay_iters, replaced.lr, replaced.zero_stage) == (25, 0.2, 1)
    assert (args.lr_decay_iters, args.lr, args.zero_stage) == (None, 0.1, 0)
    assert replaced.replace(train_iters=None).lr_decay_iters is None
    with pytest.raises(ConfigError, match="seed: expected int"):
        args.replace(seed="x")
    with pytest.raises(ConfigError, match="unknown key; did you mean seed"):
        args.replace(seeds=1)


def test_json_round_trip_is_lossless(write):
    text = TEXT + "optimizer: {type: AdamW, params: {lr: 1.0e-1, betas: [0.9, 0.95]}}\ntrain_batch_size: 8\n# a note\n"
    args = load(write(a=text), ["zero_optimization.stage=1", "attention_config=[[[flash], 2]]"])
    for original in (args, args.for_world(4), args.for_world(4).replace(seed=7)):
        reloaded = NeoXArgs.from_json(original.to_json())
        assert reloaded == original
        assert reloaded.config_files == {"a.yml": text}
        assert (
            reloaded.origin("optimizer.params.lr") == "a.yml:6"
            and reloaded.origin("zero_optimization.stage") == "--set"
        )
        assert reloaded.world_size == original.world_size


def test_copies(args):
    assert pickle.loads(pickle.dumps(args)) == args
    assert copy.deepcopy(args) == args
    with pytest.raises(TypeError, match="read-only"):
        pickle.loads(pickle.dumps(args)).optimizer["type"] = "SGD"


def test_origins(args):
    keys = ("num_layers", "seed", "attention_config", "optimizer.params.lr", "optimizer.params.eps")
    assert list(map(args.origin, keys)) == ["program", "default", "derived", "program", "default"]


def test_derived_properties(model):
    args = NeoXArgs.from_dict(model | {"activation": "swiglu", "num_kv_heads": 2, "precision": "bfloat16"})
    assert (args.head_dim, args.kv_heads, args.is_gated, args.params_dtype) == (16, 2, True, "bf16")
    assert (args.pp, args.tp, args.optimizer_name, args.lr, args.zero_stage) == (1, 1, "adam", 1e-3, 0)
    assert args.replace(num_kv_heads=None, activation="gelu").kv_heads == 4


@pytest.mark.parametrize("values, precision, section", [
    ({}, "fp32", None),
    ({"precision": "fp16"}, "fp16", "fp16"),
    ({"fp16": {"enabled": True}}, "fp16", "fp16"),
    ({"precision": "fp16", "fp16": {"loss_scale": 4}}, "fp16", "fp16"),
    ({"precision": "BFloat16"}, "bfloat16", "bf16"),
    ({"bf16": {"enabled": True}}, "bfloat16", "bf16"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bfloat16", "bf16"),
    ({"fp16": {"enabled": False}}, "fp32", None),
])  # fmt: skip
def test_precision_and_its_sections_agree(model, values, precision, section):
    args = NeoXArgs.from_dict(model | values)
    assert args.precision == precision
    enabled = [name for name in ("fp16", "bf16") if (getattr(args, name) or {}).get("enabled")]
    assert enabled == ([section] if section else [])


def test_clipping_as_written_and_as_neox_read_it(model):
    assert NeoXArgs.from_dict(model).gradient_clipping == 1.0
    args = NeoXArgs.from_dict(model | {"gradient_clipping": 1, "compat_clip_one_is_off": True})
    assert args.gradient_clipping == 0.0 and args.origin("gradient_clipping") == "derived from program"
    assert any("compat_clip_one_is_off" in note for note in args.startup_notes())
    args = NeoXArgs.from_dict(model | {"gradient_clipping": 0.5, "compat_clip_one_is_off": True})
    assert args.gradient_clipping == 0.5 and args.startup_notes() == []


def test_no_save_optim_as_gpt_neox_takes_it_and_as_written(model):
    args = NeoXArgs.from_dict(model | {"no_save_optim": True})
    assert not args.compat_no_save_optim and message_states(
        *args.startup_notes(), "no_save_optim no effect compat_no_save_optim"
    )
    assert NeoXArgs.from_dict(json.loads(args.to_json())["given"]).startup_notes() == args.startup_notes()
    assert re.search(r"^no_save_optim: +true +# program$", print_config(args), re.M), "as it was given"
    args = NeoXArgs.from_dict(model | {"no_save_optim": True, "compat_no_save_optim": True})
    assert message_states(*args.startup_notes(), "compat_no_save_optim no_load_optim")


def test_layernorm_without_biases_is_said_since_gpt_neox_has_them(model):
    values = model | {"norm": "layernorm", "use_bias_in_norms": False}
    assert message_states(*NeoXArgs.from_dict(values).startup_notes(), "use_bias_in_norms compat_norm_bias")
    assert NeoXArgs.from_dict(values | {"norm": "rmsnorm"}).startup_notes() == []


def test_settings_without_effect_are_named_once_and_not_in_their_sections(model):
    values = {"rope_fusion": True, "layernorm_fusion": False, "fp16": {"enabled": True, "type": "fp16", "fp16": False}}
    args = NeoXArgs.from_dict(model | values | {"zero_optimization": {"stage": 1}})
    (note,) = args.startup_notes()
    assert "rope_fusion (" in note and "fp16.fp16 (" in note and "layernorm_fusion" not in note
    assert args.fp16 is not None and "type" not in args.fp16 and "load_from_fp32_weights" not in args.zero_optimization


@pytest.mark.parametrize("config, kinds", [
    ([[["flash"], 4]], ("flash",) * 4),
    ([[["global", "flash"], 2]], ("global", "flash") * 2),
    ([[["global"], 1], [["flash"], 3]], ("global", "flash", "flash", "flash")),
    ([[["global", "flash"], "all"]], ("global", "flash") * 2),
    (["flash", "global", "flash", "flash"], ("flash", "global", "flash", "flash")),
    (None, ("global",) * 4),
])  # fmt: skip
def test_attention_config(model, config, kinds):
    args = NeoXArgs.from_dict(model | {"num_layers": 4, "attention_config": config})
    assert args.attention_config == kinds


def test_a_key_that_repeats_another_follows_it(write):
    """`lr: null` says nothing; an override of the source is meant for both."""
    text = TEXT + "optimizer: {params: {lr: 1e-4}}\n"
    assert load(write(a=text + "lr:\nzero_stage:\nclip_grad:\n")).lr == 1e-4
    args = load(write(a=text + "lr: 1e-4\n"), ["optimizer.params.lr=2e-4"])
    assert args.lr == 2e-4 and args.replace(**{"optimizer.params.lr": 3e-4}).lr == 3e-4
    assert load(write(a=text + "lr: 1e-4\n")).replace(**{"optimizer.params.lr": 3e-4}).lr == 3e-4


def test_deep_pipelines_have_longer_to_begin() -> None:
    limits = [
        NeoXArgs.from_dict({**MODEL, "num_layers": 24, **keys}).first_step_limit_mins
        for keys in ({}, {"pipe_parallel_size": 22}, {"pipe_parallel_size": 22, "first_step_timeout_mins": 5})
    ]
    assert limits == [30.0, 93.0, 5.0], "22 stages took up to 90 minutes"
