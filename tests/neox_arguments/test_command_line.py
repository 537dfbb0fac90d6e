"""The command line: what the flags of GPT-NeoX set, and that both commands mean the same."""

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, load, parse_script
from megatron.neox_arguments.reading.command_line import parse_deepy
from tests.neox_arguments.conftest import TEXT


@pytest.fixture
def folder(write, tmp_path):
    write(a=TEXT, b="seed: 3\nwandb_group: file\n", train__py="")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yml").write_text(TEXT)
    (tmp_path / "sub" / "c.json").write_text('{"seed": 4}')
    return tmp_path


@pytest.fixture
def printed(capsys):
    """Returns the output of a command line that exits with code 0 and starts nothing."""

    def run(argv, parse=parse_deepy):
        with pytest.raises(SystemExit) as exited:
            parse(argv)
        assert exited.value.code == 0
        return capsys.readouterr().out

    return run


def parse_train(argv):
    return parse_script(argv, "train.py")


def test_files_alone_are_the_same_as_load_in_any_folder_and_without_ending(folder):
    command = parse_deepy(["train.py", "a.yml", "b.yml"])
    assert (command.user_script, command.print_config) == ("train.py", False)
    assert command.args == load(["a.yml", "b.yml"]) == parse_script(["a.yml", "b"], "train.py")
    args = parse_deepy(["train.py", "-d", "sub", "a", "c.json"]).args
    assert (args.seed, args.origin("seed")) == (4, "sub/c.json:1")
    assert parse_deepy(["--conf_dir", "sub", "train.py", "a", "c.json"]).args == args


@pytest.mark.parametrize("flags, key, value", [
    (["-H", "a.txt"], "hostfile", "a.txt"), (["-i", "a.txt"], "sample_input_file", "a.txt"),
    (["-o", "a.txt"], "sample_output_file", "a.txt"),
    *(([f"--{key}", "x:2,3"], key, "x:2,3") for key in ("hostfile", "sample_input_file", "include")),
    *(([f"--{key}", "x:2,3"], key, "x:2,3") for key in ("wandb_group", "wandb_run_name", "wandb_team")),
    *(([f"--{key}", "7"], key, 7) for key in ("iteration", "num_gpus")),
    (["--fp8"], "precision_fp8", "auto"),
    (["--no-fp8"], "precision_fp8", "off"),
])  # fmt: skip
def test_flags_set_keys_over_files(folder, flags, key, value):
    for argv in (["train.py", "a", "b", *flags], [*flags, "train.py", "a", "b"], ["train.py", "a", *flags, "b"]):
        args = parse_deepy(argv).args
        assert getattr(args, key) == value
        assert args.origin(key).startswith("--")
    assert getattr(parse_train(["a", "b", *flags]), key) == value
    unset = {"wandb_group": "b.yml:2", "precision_fp8": "derived"}.get(key, "default")
    assert parse_deepy(["train.py", "a", "b"]).args.origin(key) == unset


def test_fp8_flags_win_over_files_and_are_typed_again_on_other_machines(folder):
    (folder / "fp8.yml").write_text("precision_fp8: off\nte_fp8_mha: true\nprecision: bfloat16\n")
    assert parse_deepy(["train.py", "a", "fp8"]).args.precision_fp8 == "off"
    forced, disabled = parse_deepy(["train.py", "a", "fp8", "--fp8"]), parse_deepy(["train.py", "a", "--no-fp8"])
    assert forced.args.precision_fp8 == "auto" and forced.args.origin("precision_fp8") == "--fp8"
    assert list(forced.words) == ["train.py", "a", "fp8", "--fp8"] and list(disabled.words)[-1] == "--no-fp8"
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
    overridden = parse_script(["a", "--hf-model", "there"], "eval.py", adopt)
    assert overridden.num_layers == 3 and overridden.origin("optimizer") == parse_script(["a"], "eval.py").origin(
        "optimizer"
    )
    with pytest.raises(SystemExit):
        parse_script(["a", "--hf-model", "there"], "train.py")


def test_set_comes_last_and_may_be_repeated(folder):
    args = parse_train(["a", "--wandb_group", "g", "--set", "wandb_group=s", "seed=1", "--set", "seed=2"])
    assert (args.wandb_group, args.seed, args.origin("wandb_group")) == ("s", 2, "--set")


def test_the_launcher_hands_over_by_a_file(folder):
    args = parse_deepy(["train.py", "a", "b", "--set", "seed=9"]).args
    (folder / "args.json").write_text(args.to_json())
    assert parse_train(["--neox-args", "args.json"]) == args


@pytest.mark.parametrize("argv, message", [
    ([], "configuration files or --neox-args FILE"),
    (["a", "--neox-args", "x"], "configuration files or --neox-args FILE.*not both"),
    (["--neox-args", "x"], "--neox-args x: No such file"),
    (["--neox-args", "a.yml"], "--neox-args a.yml: .*deepy.py"),
    (["--neox-args", "x", "--set", "seed=1"], "--neox-args .*complete"),
    (["missing"], "missing.yml: no such file"),
    (["--set", "seed=1", "a.yml"], "before --set"),
    (["train.py", "--set", "seed=1"], "no configuration files.*usage"),
    (["trian.py", "a"], "trian.py: no such script.*usage: deepy.py SCRIPT CONF"),
])  # fmt: skip
def test_bad_command_lines(folder, argv, message):
    with pytest.raises(ConfigError, match=message):
        (parse_deepy if argv[:1] and argv[0].endswith(".py") else parse_train)(argv)


def test_what_is_printed_of_a_configuration_and_of_the_commands(folder, printed):
    assert parse_deepy(["train.py", "a", "--print-config"]).print_config
    assert "num_layers:" in printed(["a", "--print-config"], parse_train)
    for parse in (parse_deepy, parse_train):
        text = printed(["--help"], parse)
        assert "examples:" in text and "--set KEY=VALUE" in text and "--print-config" in text


def test_from_dict_equals_files(folder, model):
    from_values, from_files = NeoXArgs.from_dict(model), parse_deepy(["train.py", "a"]).args
    names = [name for name in from_values.__dataclass_fields__ if name not in ("origins", "config_files")]
    assert [getattr(from_values, name) for name in names] == [getattr(from_files, name) for name in names]


def test_the_page_of_a_key_is_printed(folder, printed):
    for argv in (["--help-config", "gradient-clipping"], ["train.py", "a", "--help-config", "gradient_clipping"]):
        text = printed(argv)
        assert text.startswith("gradient_clipping\n")
        assert "default   1.0" in text and "honoured, differs" in text and "#1432" in text
    pages = printed(["--help-config", "lr_*"]).split("\n\n")
    assert {page.splitlines()[0] for page in pages} >= {"lr_decay_style", "lr_decay_iters", "lr_scaling"}
    for key, kinds, group in (
        ("kv_cache_gb", "auto or float", "Textgen"),
        ("layer_types", "list of full_attention, sliding_attention", "Model"),
        ("te_fp8_format", "hybrid, e4m3", "FP8"),
        ("mup_attn_temp", "float", "MuP"),
        ("moe_top_k", "int", "MoE"),
        ("train_impl", "normal, dpo, rm, kto, reinforce", "Post training"),
    ):
        text = printed(["--help-config", key])
        assert f"type      {kinds}\n" in text and f"group     {group}\n" in text
    with pytest.raises(ConfigError, match="gradient_cliping: no .*key.*gradient_clipping"):
        parse_deepy(["--help-config", "gradient_cliping"])


def test_two_runs_are_compared(folder, printed):
    (folder / "c.yml").write_text((folder / "a.yml").read_text() + "seed: 3\n")
    (folder / "saved").mkdir()
    (folder / "saved" / "a.yml").write_text((folder / "a.yml").read_text())
    for saved_run in ("a", "saved"):
        assert printed(["--diff-config", saved_run, "c.yml"]).startswith("seed: 1234 (default) -> 3 (c.yml:")
    assert printed(["--diff-config", "a,b", "a.yml,b"]) == "no value differs\n"
