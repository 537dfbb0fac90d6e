"""`--set key=value`: last of all, dotted paths, YAML values, null removes."""

import pytest

from megatron.neox_arguments import ConfigError, load
from tests.neox_arguments.conftest import TEXT, message_states

EXTRA_TEXT = """\
seed: 5
optimizer: {type: Adam, params: {lr: 0.01, betas: [0.9, 0.95]}}
fp16: {enabled: true, loss_scale: 0}
"""


@pytest.fixture
def files(write):
    return write(a=TEXT + EXTRA_TEXT)


def test_overrides_win_and_say_so(files):
    args = load(files, ["num-layers=4", "optimizer.params.lr=1e-3", "extra_save_iters=[0, 2]", "split=1,0,0"])
    assert (args.num_layers, args.lr, args.extra_save_iters, args.split) == (4, 1e-3, (0, 2), "1,0,0")
    assert args.optimizer["params"]["betas"] == (0.9, 0.95)
    assert args.origin("num_layers") == args.origin("optimizer.params.lr") == "--set"
    assert args.origin("optimizer.params.betas") == "a.yml:7"
    assert load(files, {"optimizer.params.lr": 0.5, "seed": None}).lr == 0.5, "of a program too"


def test_null_resets_a_key_and_removes_a_section(files):
    args = load(files, ["seed=null", "fp16=null", "precision=fp32"])
    assert (args.seed, args.fp16, args.precision) == (1234, None, "fp32")
    assert args.origin("seed") == "default"
    assert load(files, ["optimizer.params.betas=null"]).optimizer["params"]["betas"] == (0.9, 0.999)
    assert load(files, ["zero_optimization.stage=null"]).zero_stage == 0


def test_a_whole_section_replaces_the_old_one_and_a_new_one_is_begun(files):
    args = load(files, ["optimizer={type: SGD, params: {lr: 1}}", "zero_optimization.stage=2"])
    assert args.optimizer == {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.0}}
    assert args.zero_stage == 2 and args.zero_optimization["reduce_bucket_size"] == 500_000_000


@pytest.mark.parametrize("override, facts", [
    ("num_layer=3", "--set: num_layer: unknown num_layers"),
    ("optimizer.params.lrr=3", "--set: optimizer.params.lrr: unknown lr"),
    ("seed=x", "--set: seed: int x"),
    ("seed.x=1", "--set: seed.x: mapping 5"),
    ("b.yml", "--set: KEY=VALUE b.yml"),
    ("seed=[1", "--set: seed: [1 YAML"),
])  # fmt: skip
def test_bad_overrides(files, override, facts):
    with pytest.raises(ConfigError) as caught:
        load(files, [override])
    assert message_states(caught.value.problems[0], facts)
