"""The command line: what the flags of GPT-NeoX set, and that both commands mean the same."""

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, load, parse_script
from megatron.neox_arguments.reading.command_line import parse_deepy

TEXT = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\nmax_position_embeddings: 32\n"


@pytest.fixture
def folder(write, tmp_path):
    write(a=TEXT, b="seed: 3\nwandb_group: file\n", train__py="")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yml").write_text(TEXT)
    (tmp_path / "sub" / "c.json").write_text('{"seed": 4}')
    return tmp_path


def test_files_alone_are_the_same_as_load(folder):
    command = parse_deepy(["train.py", "a.yml", "b.yml"])
    assert (command.user_script, command.print_config) == ("train.py", False)
    assert command.args == load(["a.yml", "b.yml"]) == parse_script(["a.yml", "b"], "train.py")


def test_conf_dir_and_names_without_ending(folder):
    args = parse_deepy(["train.py", "-d", "sub", "a", "c.json"]).args
    assert (args.seed, args.origin("seed")) == (4, "sub/c.json:1")
    assert parse_deepy(["--conf_dir", "sub", "train.py", "a", "c.json"]).args == args


@pytest.mark.parametrize(
    "flags, key, value",
    [
        (["-H", "hosts"], "hostfile", "hosts"),
        (["--hostfile", "hosts"], "hostfile", "hosts"),
        (["-i", "in.txt"], "sample_input_file", "in.txt"),
        (["--sample_input_file", "in.txt"], "sample_input_file", "in.txt"),
        (["-o", "out.txt"], "sample_output_file", "out.txt"),
        (["--iteration", "7"], "iteration", 7),
        (["--wandb_group", "g"], "wandb_group", "g"),
        (["--wandb_run_name", "r"], "wandb_run_name", "r"),
        (["--wandb_team", "t"], "wandb_team", "t"),
        (["--num_gpus", "2"], "num_gpus", 2),
        (["--include", "localhost:2,3"], "include", "localhost:2,3"),
        (["--fp8"], "precision_fp8", "auto"),
        (["--no-fp8"], "precision_fp8", "off"),
    ],
)
def test_flags_set_keys_over_files(folder, flags, key, value):
    for argv in (["train.py", "a", "b", *flags], [*flags, "train.py", "a", "b"], ["train.py", "a", *flags, "b"]):
        args = parse_deepy(argv).args
        assert getattr(args, key) == value
        assert args.origin(key).startswith("--")
    assert getattr(parse_script(["a", "b", *flags], "train.py"), key) == value
    unset = {"wandb_group": "b.yml:2", "precision_fp8": "derived"}.get(key, "default")
    assert parse_deepy(["train.py", "a", "b"]).args.origin(key) == unset


def test_fp8_flags_win_over_files_and_are_typed_again_on_other_machines(folder):
    (folder / "fp8.yml").write_text("precision_fp8: off\nte_fp8_mha: true\nprecision: bfloat16\n")
    assert parse_deepy(["train.py", "a", "fp8"]).args.precision_fp8 == "off"
    forced, kept = parse_deepy(["train.py", "a", "fp8", "--fp8"]), parse_deepy(["train.py", "a", "--no-fp8"])
    assert forced.args.precision_fp8 == "auto" and forced.args.origin("precision_fp8") == "--fp8"
    assert list(forced.words) == ["train.py", "a", "fp8", "--fp8"] and list(kept.words)[-1] == "--no-fp8"
    assert parse_deepy(["train.py", "a", "--set", "te_fp8_mha=true"]).args.precision_fp8 == "te"


def test_evaluation_flags_reach_their_keys(folder):
    args = parse_deepy(["train.py", "a", "--eval_tasks", "piqa", "arc", "--eval_results_prefix", "p"]).args
    assert (args.eval_tasks, args.eval_results_prefix) == (("piqa", "arc"), "p")
    assert args.origin("eval_tasks") == "--eval_tasks"


def test_a_huggingface_model_stands_for_files_where_a_script_takes_one(folder):
    def adopt(name):
        sizes = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
        return {**sizes, "max_position_embeddings": 8, "load": name}

    for args in (
        parse_script(["--hf-model", "there", "--set", "seq_length=4"], "eval.py", adopt),
        parse_deepy(["train.py", "--hf-model", "there", "--set", "seq_length=4"], adopt).args,
    ):
        assert (args.num_layers, args.load, args.seq_length) == (3, "there", 4)
        assert args.origin("num_layers") == "--hf-model"
    over = parse_script(["a", "--hf-model", "there"], "eval.py", adopt)
    assert over.num_layers == 3 and over.origin("optimizer") == parse_script(["a"], "eval.py").origin("optimizer")
    with pytest.raises(SystemExit):
        parse_script(["a", "--hf-model", "there"], "train.py")


def test_set_comes_last_and_may_be_repeated(folder):
    args = parse_script(["a", "--wandb_group", "g", "--set", "wandb_group=s", "seed=1", "--set", "seed=2"], "train.py")
    assert (args.wandb_group, args.seed, args.origin("wandb_group")) == ("s", 2, "--set")


def test_the_launcher_hands_over_by_a_file(folder):
    args = parse_deepy(["train.py", "a", "b", "--set", "seed=9"]).args
    (folder / "args.json").write_text(args.to_json())
    assert parse_script(["--neox-args", "args.json"], "train.py") == args


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "give configuration files or --neox-args FILE"),
        (["a", "--neox-args", "x"], "give configuration files or --neox-args FILE, not both"),
        (["--neox-args", "x"], "--neox-args x: No such file"),
        (["--neox-args", "a.yml"], "--neox-args a.yml: not a file written by deepy.py"),
        (["--neox-args", "x", "--set", "seed=1"], "--neox-args is complete in itself"),
        (["missing"], "missing.yml: no such file"),
        (["--set", "seed=1", "a.yml"], "config files stand before --set"),
    ],
)
def test_bad_command_lines(folder, argv, message):
    with pytest.raises(ConfigError, match=message):
        parse_script(argv, "train.py")


def test_deepy_without_files(folder):
    with pytest.raises(ConfigError, match="no configuration files; usage"):
        parse_deepy(["train.py", "--set", "seed=1"])


def test_a_script_that_is_not_there(folder):
    with pytest.raises(ConfigError, match=r"trian.py: no such script; usage: deepy.py SCRIPT CONF"):
        parse_deepy(["trian.py", "a"])


def test_print_config(folder, capsys):
    assert parse_deepy(["train.py", "a", "--print-config"]).print_config
    with pytest.raises(SystemExit) as stopped:
        parse_script(["a", "--print-config"], "train.py")
    assert stopped.value.code == 0
    assert "num_layers:" in capsys.readouterr().out


def test_help_shows_examples(capsys):
    for parse in (parse_deepy, lambda argv: parse_script(argv, "train.py")):
        with pytest.raises(SystemExit):
            parse(["--help"])
        out = capsys.readouterr().out
        assert "examples:" in out and "--set KEY=VALUE" in out and "--print-config" in out


def test_from_dict_equals_files(folder, model):
    ours, theirs = NeoXArgs.from_dict(model), parse_deepy(["train.py", "a"]).args
    names = [name for name in ours.__dataclass_fields__ if name not in ("origins", "config_files")]
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


def test_the_page_of_a_key_is_printed(folder, capsys):
    for argv in (["--help-config", "gradient-clipping"], ["train.py", "a", "--help-config", "gradient_clipping"]):
        with pytest.raises(SystemExit) as exited:
            parse_deepy(argv)
        text = capsys.readouterr().out
        assert exited.value.code == 0 and text.startswith("gradient_clipping\n")
        assert "default   1.0" in text and "honoured, differs" in text and "#1432" in text
    with pytest.raises(SystemExit):
        parse_deepy(["--help-config", "lr_*"])
    pages = capsys.readouterr().out.split("\n\n")
    assert {page.splitlines()[0] for page in pages} >= {"lr_decay_style", "lr_decay_iters", "lr_scaling"}
    with pytest.raises(ConfigError, match="no such key; near are .*gradient_clipping"):
        parse_deepy(["--help-config", "gradient_cliping"])


def test_two_runs_are_compared(folder, capsys):
    (folder / "c.yml").write_text((folder / "a.yml").read_text() + "seed: 3\n")
    (folder / "saved").mkdir()
    (folder / "saved" / "a.yml").write_text((folder / "a.yml").read_text())
    for one in ("a", "saved"):
        with pytest.raises(SystemExit) as exited:
            parse_deepy(["--diff-config", one, "c.yml"])
        assert exited.value.code == 0
        assert capsys.readouterr().out.startswith("seed: 1234 (default) -> 3 (c.yml:")
    with pytest.raises(SystemExit):
        parse_deepy(["--diff-config", "a,b", "a.yml,b"])
    assert capsys.readouterr().out == "no value differs\n"
