"""`neox`: which script each name starts."""

import re
import sys
from pathlib import Path

import pytest

from megatron.launch.command import help_text, main, script_line, tools
from megatron.launch.environment import LaunchError
from megatron.neox_arguments import ConfigError, load
from megatron.neox_arguments.reading.command_line import parse_deepy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train a.yml b.yml --set seed=1", "deepy.py train.py a.yml b.yml --set seed=1"),
        ("train.py --num_gpus 2 a", "deepy.py train.py --num_gpus 2 a"),
        ("eval --hf-model DIR", "deepy.py eval.py --hf-model DIR"),
        ("serve a.yml", "deepy.py tools/serve.py a.yml"),
        ("doctor --json", "deepy.py doctor --json"),
        ("--help-config lr_*", "deepy.py --help-config lr_*"),
        ("preprocess_data --help", "tools/datasets/preprocess_data.py --help"),
        ("convert-neox-to-hf", "tools/ckpts/convert_neox_to_hf.py"),
        ("datasets/verify x", "tools/datasets/verify.py x"),
        ("convert_hf_gptneox_to_neox", "huggingface/convert_hf_gptneox_to_neox.py"),
        ("prepare_data enwik8", "prepare_data.py enwik8"),
    ],
)
def test_each_name_starts_what_is_typed_in_a_clone(words, line):
    python, *command = script_line(words.split(), ROOT)
    assert python == sys.executable
    assert [word.removeprefix(f"{ROOT}/") for word in command] == line.split()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("verify", "verify is ckpts/verify or datasets/verify"),
        ("trian", "trian: no such command; do you mean train? `neox --help` lists them"),
        ("preproces-data", "preproces-data: no such command; do you mean preprocess_data?"),
        ("config_reference", "no such command"),
        ("a.yml", "a.yml: no such command; `neox --help` lists them"),
    ],
)
def test_other_names_are_refused(name, said):
    with pytest.raises(LaunchError, match=re.escape(said)):
        script_line([name], ROOT)


def test_every_script_with_a_main_has_a_name_and_a_line_of_help():
    scripts = {path for path in ROOT.glob("tools/*/*.py") if "\n    main()" in path.read_text()}
    scripts -= set(ROOT.glob("tools/docs/*"))
    tool_paths = tools(ROOT)
    assert scripts <= set(tool_paths.values()) and len(scripts) >= 15
    lines = help_text(ROOT).splitlines()
    for name in ("train", "serve", *tool_paths):
        assert [line for line in lines if line.split()[:1] == [name] and len(line.split()) > 2], name


def test_without_a_command_it_helps_and_a_wrong_one_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["neox"])
    assert main() == 0 and capsys.readouterr().out.startswith("usage: neox COMMAND")
    monkeypatch.setattr(sys, "argv", ["neox", "trian"])
    assert main() == 2 and capsys.readouterr().err.startswith("neox: error: trian")


def test_presets_are_named_as_files_of_ones_own_which_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def taken(*words):
        command = parse_deepy(["train.py", *words], preset_root=ROOT)
        return [path.removeprefix(f"{ROOT}/") for path in command.presets], command.args

    both = ["configs/pythia/14M.yml", "configs/local_setup.yml"]
    presets, args = taken("pythia/14M", "local_setup.yml")
    assert presets == both and args.hidden_size == 128
    assert args.origin("hidden_size").startswith(f"{ROOT}/configs/pythia/14M.yml:")
    assert taken("-d", "configs", "pythia/14M", "local_setup")[0] == taken("configs/pythia/14M.yml", both[1])[0] == both
    assert args == load([str(ROOT / file) for file in both])
    (tmp_path / "local_setup.yml").write_text((ROOT / both[1]).read_text() + "seed: 7\n")
    presets, args = taken("pythia/14M", "local_setup")
    assert presets == both[:1] and args.seed == 7
    for name in ("pythia/15M", "../megatron/launch"):
        with pytest.raises(ConfigError, match=name):
            taken(name)
    with pytest.raises(ConfigError, match="pythia/14M"):  # who asks for none gets none
        parse_deepy(["train.py", "pythia/14M"])
