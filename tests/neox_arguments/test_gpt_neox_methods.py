"""NeoXArgs does what GPT-NeoX's tests/neox_args check."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from deepspeed.launcher import runner

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.frozen import thaw
from tests.neox_arguments.conftest import ELEUTHER, ROOT

CONFIGS = ROOT / "configs"
FILES = ("125M.yml", "local_setup.yml")


def paths(*names: str) -> list[str]:
    return [str(CONFIGS / name) for name in names]


@pytest.fixture
def set_argv(monkeypatch):
    """Sets sys.argv."""
    monkeypatch.chdir(ROOT)
    return lambda *words: monkeypatch.setattr("sys.argv", list(words))


@pytest.mark.parametrize("words", [paths(*FILES), paths("125M", "local_setup"), ["-d", str(CONFIGS), *FILES]])
def test_a_command_line_means_its_files(set_argv, words):
    set_argv("deepy.py", "train.py", *words)
    typed_args, args = NeoXArgs.consume_deepy_args(), NeoXArgs.from_ymls(paths(*FILES))
    assert typed_args != args, "only a command line names the script"
    args.update_value("user_script", "train.py")
    assert typed_args == args
    set_argv("deepy.py", "--hostfile", "hosts", "train.py", *words)
    assert NeoXArgs.consume_deepy_args().hostfile == "hosts"


def test_what_deepspeeds_launcher_is_handed_comes_back(set_argv):
    baseline = NeoXArgs.from_ymls(paths(*FILES), {"master_port": 1234, "force_multi": True})
    baseline.user_script = "train.py"
    words = baseline.get_deepspeed_main_args()
    set_argv(*words)
    args = NeoXArgs.consume_neox_args()
    assert args == baseline and args.megatron_config == baseline.megatron_config
    read = runner.parse_args(words)
    assert (read.user_script, read.master_port, read.force_multi) == ("train.py", 1234, True)
    set_argv(read.user_script, *read.user_args)  # as a rank is started
    assert NeoXArgs.consume_neox_args({"train_iters": 7}).train_iters == 7
    Path(words[-1]).unlink()
    set_argv("train.py")
    with pytest.raises(ConfigError, match="--neox-args FILE is missing"):
        NeoXArgs.consume_neox_args()


@pytest.mark.parametrize("size", ["125M", "350M", "760M", "1-3B", "2-7B", "6-7B", "13B", "175B"])
@pytest.mark.parametrize("extra_files", [(), ("text_generation.yml",)], ids=["train", "generate"])
def test_every_value_of_a_file_is_that_of_the_attribute(size, extra_files):
    files = paths(f"{size}.yml", "local_setup.yml", *extra_files)
    args = NeoXArgs.from_ymls(files)
    assert isinstance(args, NeoXArgs)
    for file in files:
        for key, value in yaml.safe_load(Path(file).read_text()).items():
            name = key.replace("-", "_")
            assert getattr(args, name) == thaw(args.user_values[name]), key
            assert getattr(args, name) == value or isinstance(value, dict | str), key  # YAML 1.1 takes 1e-4 for text


@pytest.mark.parametrize("name", ["configs/125M.yml + configs/local_setup.yml", "configs/20B.yml"])
def test_the_values_gpt_neox_made_of_its_own_files(name, tmp_path):
    values = ELEUTHER["loaded"][name]["values"]
    files = [tmp_path / f"{half}.yml" for half in (0, 1)]
    for half, file in enumerate(files):
        file.write_text(yaml.safe_dump(dict(list(values.items())[half::2])))
    args = NeoXArgs.from_ymls(files)
    reloaded = NeoXArgs.from_dict(values).megatron_config
    assert args.megatron_config == reloaded | {"config_files": thaw(args.config_files)}
    assert all(reloaded[name] == values[name] for name in ("num_layers", "hidden_size", "seq_length"))
    assert "rms_norm_epsilon" not in args.megatron_config


def test_required_keys_are_required():
    for make in (lambda: NeoXArgs.from_ymls(paths("local_setup.yml")), NeoXArgs):
        with pytest.raises(ConfigError, match="num_layers.*(required|from_dict)"):
            make()


def test_no_key_is_declared_twice():
    assert NeoXArgs.validate_keys()

    class DuplicateKey(NeoXArgs):
        num_layers: int

    with pytest.raises(ValueError, match="num_layers"):
        type("Child", (DuplicateKey,), {}).validate_keys()


def test_what_is_resolved_is_not_written_to(model):
    args = NeoXArgs.from_dict(model)
    with pytest.raises(TypeError, match=r"args = args.replace\(user_script='train.py'\)"):
        args.update_value("user_script", "train.py")
    with pytest.raises(TypeError, match=r"args = args.for_world\(world_size\)"):
        args.configure_distributed_args()
    with pytest.raises(FrozenInstanceError):
        args.wandb_group = "other"
    assert args.replace(wandb_group="other").wandb_group == "other"
