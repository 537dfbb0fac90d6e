"""deepy.py as it is run_deepy, and `neox`: which script each name starts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import deepy as deepy_main
from megatron.launch.command import help_text, main, script_line, tools
from megatron.launch.environment import LaunchError
from megatron.launch.plan import plan
from megatron.launch.run import write_args_file
from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.reading.command_line import parse_deepy
from tests.launch.runs import ROOT, deepy, write_script
from tests.training.runs import BASE

SHOW = """\
from megatron.launch import process_info
from megatron.neox_arguments.reading.command_line import parse_script
args = parse_script(sys.argv[1:], "script.py")
print(process_info().rank, args.hidden_size, args.num_layers, args.train_micro_batch_size_per_gpu)
"""
RunDeepy = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_deepy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunDeepy:
    """Exit code, stdout and stderr of words that start nothing, in this process."""
    write_script(tmp_path, SHOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["deepy.py", *words])
        return deepy_main.main(), *capsys.readouterr()

    return run


def test_two_ranks_get_the_resolved_args(tmp_path: Path) -> None:
    done = deepy(tmp_path, SHOW, "--set", "num_layers=4", f"log_dir={tmp_path}/out")
    assert (done.returncode, done.stdout) == (0, "0 8 4 4\n")
    assert (tmp_path / "out" / "rank_1.log").read_text() == "1 8 4 4\n"


def test_print_config_starts_nothing(run_deepy: RunDeepy, tmp_path: Path) -> None:
    code, out, _ = run_deepy("script.py", "-d", ".", "model", "--print-config")
    assert code == 0 and "model.yml:2" in out
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("words", "facts"), [
    (("nothing.py", "model.yml"), ["nothing.py: no such script"]),
    (("fine-tune", "model.yml"), ["fine-tune: no such script; did you mean finetune?"]),
    (("script.py", "model.yml", "--set", "hidden_sice=9"), ["hidden_sice", "hidden_size"]),
    (("script.py", "model.yml", "--num_gpus", "3", "--set", "model_parallel_size=2"), ["3 ranks", "2"]),
    (("script.py", "model.yml", "--include", "localhost:0"), ["include", "localhost:0"]),
    ((str(ROOT / "train.py"), "model.yml", "--set", "coord_check=true"), ["coord_check: true"]),
    ((str(ROOT / "train.py"), "model.yml", "--set", "seed=1"), ["data_path", "required"]),
    ((str(ROOT / "eval.py"), "model.yml", "--set", "coord_check=true"), ["coord_check: true"]),
    ((str(ROOT / "generate.py"), "model.yml", "--set", "use_mup=true"), ["use_mup: true"]),
])  # fmt: skip
def test_a_run_and_a_dry_run_are_refused_alike(run_deepy: RunDeepy, words: tuple[str, ...], facts: list[str]) -> None:
    code, out, err = run_deepy(*words)
    assert (code, out) == (1, "") and all(fact in err for fact in facts)
    assert all(line.startswith("deepy.py: error: ") for line in err.splitlines())
    assert run_deepy(*words, "--dry-run") == (code, out, err)


def test_runs_that_share_a_log_dir_keep_their_own_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for pid, lr in ((1, 1e-3), (2, 5e-3)):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        values = {**BASE, "log_dir": str(tmp_path), "optimizer": {"type": "Adam", "params": {"lr": lr}}}
        run = plan("train.py", NeoXArgs.from_dict(values))
        write_args_file(run)
        files.append(run.command[-1])
    assert [NeoXArgs.from_json(Path(file).read_text()).lr for file in files] == [1e-3, 5e-3]


@pytest.mark.parametrize(("words", "line"), [
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
])  # fmt: skip
def test_each_name_starts_what_is_typed_in_a_clone(words, line):
    python, *command = script_line(words.split(), ROOT)
    assert python == sys.executable
    assert [word.removeprefix(f"{ROOT}/") for word in command] == line.split()


@pytest.mark.parametrize(("name", "message"), [
    ("verify", "verify: .*ckpts/verify .*datasets/verify"),
    ("trian", "trian: no such command.* train.*neox --help"),
    ("preproces-data", "preproces-data: no such command.* preprocess_data"),
    ("config_reference", "no such command"),
    ("a.yml", "a.yml: no such command.*neox --help"),
])  # fmt: skip
def test_other_names_are_refused(name, message):
    with pytest.raises(LaunchError, match=message):
        script_line([name], ROOT)


def test_every_script_with_a_main_has_a_name_and_a_line_of_help():
    scripts = {path for path in ROOT.glob("tools/*/*.py") if "\n    run_command(main)" in path.read_text()}
    scripts = {path for path in scripts if not path.is_symlink()}  # names of GPT-NeoX, which say what is here
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

    def config_files_of(*words):
        command = parse_deepy(["train.py", *words], preset_root=ROOT)
        return [path.removeprefix(f"{ROOT}/") for path in command.presets], command.args

    presets_of_run = ["configs/pythia/14M.yml", "configs/local_setup.yml"]
    presets, args = config_files_of("pythia/14M", "local_setup.yml")
    assert presets == presets_of_run and args.hidden_size == 128
    assert args.origin("hidden_size").startswith(f"{ROOT}/configs/pythia/14M.yml:")
    assert (
        config_files_of("-d", "configs", "pythia/14M", "local_setup")[0]
        == config_files_of("configs/pythia/14M.yml", presets_of_run[1])[0]
        == presets_of_run
    )
    assert args == load([str(ROOT / file) for file in presets_of_run])
    (tmp_path / "local_setup.yml").write_text((ROOT / presets_of_run[1]).read_text() + "seed: 7\n")
    presets, args = config_files_of("pythia/14M", "local_setup")
    assert presets == presets_of_run[:1] and args.seed == 7
    for name in ("pythia/15M", "../megatron/launch"):
        with pytest.raises(ConfigError, match=name):
            config_files_of(name)
    with pytest.raises(ConfigError, match="pythia/14M"):  # who asks for none gets none
        parse_deepy(["train.py", "pythia/14M"])
