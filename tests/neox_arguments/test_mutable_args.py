"""The configuration that programs written for GPT-NeoX write to, and what it freezes into."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megatron
from megatron.neox_arguments import ConfigError, MutableNeoXArgs, load, neox_args, script_args
from megatron.neox_arguments import NeoXArgs as Resolved
from megatron.neox_arguments.keys.declaration import keys_of
from tests.neox_arguments.conftest import MODEL, ROOT

# As GPT-NeoX's files write them: JSON-like, dashes, sections with some of their keys, a list in a section.
FILE = """
{ "num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32, "max-position-embeddings": 32,
  "optimizer": { "type": "Adam", "params": { "lr": 0.0006, "betas": [0.9, 0.95] } },
  "zero_optimization": { "stage": 1, "reduce_bucket_size": 500000000 },
  "fp16": { "fp16": true, "enabled": true, "loss_scale": 0, "hysteresis": 2 },
  "hidden-dropout": 0, "train_micro_batch_size_per_gpu": 4, "extra-save-iters": [1, 5], "train-iters": 20 }
"""
# Some keys of each of GPT-NeoX's groups, first and last among them.
GROUPS = {
    "NeoXArgsDeepspeedRunner": ("hostfile", "launcher", "autotuning_run", "account"),
    "NeoXArgsDeepspeedConfig": ("deepspeed", "train_batch_size", "optimizer", "fp16", "data_types"),
    "NeoXArgsModel": ("precision", "num_layers", "attention_config", "te_mha", "serve_model_weights", "head_size"),
    "NeoXArgsMoE": ("moe_num_experts", "moe_jitter_eps"),
    "NeoXArgsLRScheduler": ("lr_decay_style", "warmup", "use_checkpoint_lr_scheduler"),
    "NeoXArgsOptimizer": ("optimizer_type", "use_bnb_optimizer", "zero_stage", "lr"),
    "NeoXArgsTokenizer": ("tokenizer_type", "padded_vocab_size"),
    "NeoXArgsTraining": ("data_path", "vocab_file", "dpo_beta", "save", "weight_decay", "clip_grad", "mup_width_scale"),
    "NeoXArgsParallelism": ("pipe_parallel_size", "world_size", "sequence_parallel"),
    "NeoXArgsLogging": ("use_wandb", "git_hash", "comet_experiment", "profile_step_stop"),
    "NeoXArgsTextgen": ("text_gen_type", "precompute_model_name", "eval_tasks"),
    "NeoXArgsOther": ("distributed_backend", "rank", "seed", "deepspeed_slurm", "iteration", "global_num_gpus"),
}


@pytest.fixture
def args(write) -> MutableNeoXArgs:
    return megatron.NeoXArgs.from_ymls(write(a=FILE))


@pytest.fixture(autouse=True)
def _single_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


def test_values_are_those_of_the_file(args):
    assert isinstance(args, megatron.NeoXArgs) and isinstance(args, Resolved)
    for key, value in yaml.safe_load(FILE).items():
        assert getattr(args, key.replace("-", "_")) == value, key
    assert args.attention_config == ["global", "global"]
    assert args.precision == "fp16" and args.zero_stage == 1 and args.text_gen_type == "unconditional"
    assert args.pp == 1 and args.origin("extra_save_iters") == "a.yml:6"


def test_what_is_written_is_in_the_frozen_one(args):
    args.train_iters = 3
    args.update_value("wandb_group", "mine")
    args.update_values({"save": "there", "attention_config": [[["flash"], 2]]})
    args.extra_save_iters.append(9)
    args.optimizer["params"]["lr"] = 1e-3
    args.fp16 = None
    frozen = args.frozen()
    assert (frozen.train_iters, frozen.lr_decay_iters, frozen.wandb_group, frozen.save) == (3, 3, "mine", "there")
    assert frozen.attention_config == ("flash", "flash") and frozen.extra_save_iters == (1, 5, 9)
    assert frozen.lr == 1e-3 and frozen.optimizer["params"]["betas"] == (0.9, 0.95) and frozen.precision == "fp32"
    assert (frozen.origin("train_iters"), frozen.origin("num_layers")) == ("program", "a.yml:2")
    assert type(frozen) is Resolved and frozen.frozen() is frozen
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.train_iters = 4
    assert args.startup_notes() == frozen.startup_notes() and args.replace(seed=5).seed == 5 and args.seed == 1234


def test_what_was_not_written_is_what_load_gives(args):
    frozen = args.frozen()
    assert frozen == load(["a.yml"]) and frozen.user_values == load(["a.yml"]).user_values
    args.num_layers = 4
    args.num_layers = 2
    assert args.frozen() == load(["a.yml"])


@pytest.mark.parametrize("key, value, message", [
    ("train_itres", 3, "train_itres: unknown.*train_iters"),
    ("train_iters", "many", 'train_iters: .*int.*"many"'),
    ("zero_optimization", {"stage": 7}, "zero_optimization.stage: .*7"),
])  # fmt: skip
def test_a_wrong_name_or_type_is_refused_where_it_is_written(args, key, value, message):
    for write in (lambda: setattr(args, key, value), lambda: args.update_value(key, value)):
        with pytest.raises(ConfigError, match=message):
            write()
    assert args.frozen() == load(["a.yml"])


def test_what_contradicts_is_refused_when_it_is_frozen(args):
    """In the middle of changes a debugger asks for names that are none, and gets that answer."""
    args.hidden_size = 66
    assert not hasattr(args, "no_such_name") and getattr(args, "another", None) is None
    with pytest.raises(ConfigError, match="program: hidden_size: "):
        args.frozen()
    args.num_attention_heads = 11
    assert args.frozen().head_dim == 6


def test_a_launched_program_gets_the_same_object(args):
    args.user_script = "train.py"
    args.train_iters = 3
    words = args.get_deepspeed_main_args()
    assert words[words.index("--neox-args") - 1] == "train.py"
    consumed = megatron.NeoXArgs.consume_neox_args(input_args=words)
    assert consumed == args and consumed.user_script == "train.py" and consumed.frozen() == args.frozen()
    consumed.seed = 1
    assert consumed != args
    assert megatron.NeoXArgs.consume_neox_args({"seed": 1}, words) == consumed
    Path(words[-1]).unlink()


def test_scripts_take_words_a_file_or_a_program_s_object(args):
    args.train_iters = 3
    words = args.get_deepspeed_main_args()
    expected = args.frozen()
    for source in (args, expected, words, words[-2:]):
        assert script_args(source, None, "train.py") == expected
        assert script_args(source, {"seed": 8}, "train.py") == expected.replace(seed=8)
    assert script_args(["a.yml"], {"train_iters": 3}, "train.py") == expected
    with pytest.raises(ConfigError, match="not both"):
        script_args(["a.yml", *words[-2:]], None, "train.py")
    Path(words[-1]).unlink()


def test_the_environment_gives_ranks_and_batch_sizes(args, monkeypatch):
    args.user_script = "mine.py"
    args.configure_distributed_args()
    assert (args.rank, args.local_rank, args.world_size) == (0, 0, 1) and args.train_batch_size == 4
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    args.gradient_accumulation_steps = 2
    args.configure_distributed_args()
    assert (args.rank, args.local_rank, args.world_size, args.user_script) == (5, 1, 8, "mine.py")
    assert (args.train_batch_size, args.batch_size, args.data_parallel_size) == (64, 4, 8)
    # A configuration with a rank in it would differ from rank to rank.
    assert args.frozen() == load(["a.yml"], {"gradient_accumulation_steps": 2}, "program").for_world(8)
    monkeypatch.setenv("WORLD_SIZE", "6")
    args.model_parallel_size = 4
    with pytest.raises(ConfigError, match="6 ranks"):
        args.configure_distributed_args()


def test_ranks_of_another_starter_are_not_taken_for_single_ones(args, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NUM_TASKS is 4.*megatron.launch.enter\(args\)"):
        args.configure_distributed_args()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="one"):
        args.configure_distributed_args()


def test_equality_is_that_of_values(args):
    rebuilt = megatron.NeoXArgs.from_dict({**args.frozen().user_values})
    assert rebuilt == args and args.frozen() == args and args == args.frozen()
    args.rank = 1
    assert rebuilt != args and args != "a.yml" and "num_layers=2" in repr(args) and "seed" not in repr(args)


def test_copies_are_objects_of_their_own(args):
    args.seed = 5
    for duplicate in (copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert duplicate == args and duplicate.frozen() == args.frozen()
        duplicate.optimizer["params"]["lr"] = 1.0
        assert duplicate != args and args.lr == 0.0006
    assert dataclasses.asdict(args)["seed"] == 5


def test_constructors_say_what_is_missing():
    assert megatron.NeoXArgs(**MODEL) == megatron.NeoXArgs.from_dict(MODEL)
    with pytest.raises(ConfigError, match="num_layers: is required"):
        megatron.NeoXArgs()
    assert megatron.NeoXArgs.from_dict(MODEL | {"user_script": "x.py"}).frozen() == load([], MODEL, "program")


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_keys_by_neox_names(name):
    for module in (megatron.neox_arguments, neox_args):
        group = getattr(module, name)
        resolved_keys = keys_of(Resolved)
        for key in GROUPS[name]:
            assert (
                keys_of(group)[key] == resolved_keys[key] or keys_of(group)[key].default == resolved_keys[key].default
            )
            assert getattr(group, key) == resolved_keys[key].default
    with pytest.raises(AttributeError, match="NeoXArgsNothing"):
        _ = megatron.neox_arguments.NeoXArgsNothing


def test_importing_megatron_reads_nothing():
    """No configuration needs torch, DeepSpeed or numpy."""
    code = (
        "import json, sys, megatron; steps, names = [], ('megatron.', 'torch', 'deepspeed', 'numpy')\n"
        "def seen(): steps.append([name for name in sys.modules if name.startswith(names)])\n"
        "seen(); from megatron import fused_kernels as k; k.load(); k.load_fused_kernels(); seen()\n"
        "from megatron import NeoXArgs; assert NeoXArgs.validate_keys(); seen(); print(json.dumps(steps))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    after_import, after_kernels, after_arguments = json.loads(run.stdout)
    assert (after_import, after_kernels) == ([], ["megatron.fused_kernels"])
    assert "megatron.neox_arguments" in after_arguments and all(
        name.startswith("megatron.") for name in after_arguments
    )
    with pytest.raises(ImportError, match="cannot import name 'NeoXArg'"):
        from megatron import NeoXArg  # noqa: F401
