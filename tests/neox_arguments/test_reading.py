"""Files: merging, spellings, duplicates, lines, and all problems told together."""

import pytest

from megatron.neox_arguments import ConfigError, load
from megatron.neox_arguments.reading.files import read_files
from tests.neox_arguments.conftest import TEXT, all_say, message_states

MODEL = TEXT.replace("num_", "num-")


def refused(files, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(files, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def test_files_are_merged_both_spellings_mean_the_same_and_files_of_one_name_are_kept(write, tmp_path):
    args = load(write(a=MODEL, b="train-iters: 7\nlr_decay_style: cosine\n"))
    assert (args.num_layers, args.hidden_size, args.train_iters, args.lr_decay_style) == (2, 64, 7, "cosine")
    assert args.origin("num_layers") == "a.yml:1"
    assert args.origin("lr_decay_style") == "b.yml:2"
    assert args.origin("warmup") == "default"
    assert args.config_files == {"a.yml": MODEL, "b.yml": "train-iters: 7\nlr_decay_style: cosine\n"}
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yml").write_text("seed: 3\n")
    args = load(["a.yml", "sub/a.yml"])
    assert args.config_files == {"a.yml": MODEL, "sub_a.yml": "seed: 3\n"}
    assert args.origin("seed") == "sub/a.yml:1"


@pytest.mark.parametrize("second_line", ["train_iters: 8", "train-iters: 8"])
def test_a_key_in_two_files_names_both_places(write, second_line):
    (problem,) = refused(write(a=MODEL + "train-iters: 7\n", b=f"seed: 1\n{second_line}\n"))
    assert message_states(problem.replace("train-iters", "train_iters"), "b.yml:2: train_iters: a.yml:6")


def test_a_recipe_may_set_seq_length_again_after_an_imported_model(write):
    args = load(write(hf_model=MODEL, recipe="seq-length: 16\n"))
    assert (args.seq_length, args.origin("seq_length")) == (16, "recipe.yml:1")
    (problem,) = refused(write(hf_model=MODEL, recipe="seq_length: 16\n", other="seq_length: 8\n"))
    assert message_states(problem, "other.yml:1: seq_length: recipe.yml:1")
    for files in ({"recipe": "seq_length: 16\n", "hf_model": MODEL}, {"hf_model": MODEL, "b": "hidden_size: 32\n"}):
        assert len(refused(write(**files))) == 1
    assert len(refused(write(hf_model=MODEL + "seq_length: 16\n"))) == 1


def test_a_key_twice_in_one_file_also_inside_a_section(write):
    problems = refused(write(a=MODEL + "seed: 1\nseed: 2\nzero_optimization:\n  stage: 0\n  stage: 1\n"))
    facts = ("a.yml:7: seed: a.yml:6", "a.yml:10: zero_optimization.stage: a.yml:9")
    assert all_say(problems, facts)


def test_all_problems_of_all_files_are_told_together(write):
    a = MODEL.replace("num-layers: 2", "num-layers: twelve") + "hiden_size: 3\nactivation: gello\n"
    b = "norm: scaled\nzero_optimization:\n  stage: 4\n  stag: 1\noptimizer: {type: Adam, params: {lr: fast}}\n"
    facts = [
        "a.yml:1: num_layers: int twelve",
        "a.yml:6: hiden_size: unknown hidden_size",
        "a.yml:7: activation: gelu geglu geglu_tanh relu relu2 softsign swish mish silu xielu reglu swiglu glu gello",
        "b.yml:1: norm: layernorm rmsnorm non_parametric_layernorm scalenorm te_rmsnorm te_layernorm scaled",
        "b.yml:3: zero_optimization.stage: 0 3 4",
        "b.yml:4: zero_optimization.stag: unknown stage",
        "b.yml:5: optimizer.params.lr: float fast",
        "c.yml: no file",
    ]
    assert all_say(sorted(refused([*write(a=a, b=b), "c.yml"])), facts)


def test_a_file_that_cannot_be_read_is_the_only_problem(write, tmp_path):
    write(latin="")
    (tmp_path / "latin.yml").write_bytes(b"seed: \xff")
    for file, facts in (("c.yml", "no file"), ("latin.yml", "read"), (".", "read")):
        (problem,) = refused([file])
        assert message_states(problem, f"{file}: {facts}")


def test_required_keys_are_named(write):
    expected = ["hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"]
    assert [problem.split(":")[0] for problem in refused(write(a="num_layers: 2\n"))] == expected


@pytest.mark.parametrize("text, line", [("num_layers: [1\n", 2), ("- 1\n- 2\n", 1), ("a: b: c\n", 1)])
def test_what_is_not_a_yaml_mapping_is_refused_with_its_line(write, text, line):
    assert refused(write(a=text))[0].startswith(f"a.yml:{line}: ")


def test_values_as_people_write_them(write):
    """Numbers and text that stays text; allowed values in any case; empty ones, which are the default."""
    text = "layernorm_epsilon: 1e-5\nmin_lr: 1E-6\nweight_decay: 1\ninit_method_std: .5\nwarmup: 5e-1\n"
    args = load(write(a=MODEL + text))
    assert (args.layernorm_epsilon, args.min_lr, args.init_method_std, args.warmup) == (1e-5, 1e-6, 0.5, 0.5)
    assert args.weight_decay == 1.0 and isinstance(args.weight_decay, float)
    args = load(write(a=MODEL + "split: 969,30,1\nwandb_group: 2024-01-01\nwandb_run_name: 12:30\n"))
    assert (args.split, args.wandb_group, args.wandb_run_name) == ("969,30,1", "2024-01-01", "12:30")
    args = load(write(a=MODEL + "norm: RMSNorm\noptimizer: {type: sgd, params: {lr: 1}}\n"))
    assert (args.norm, args.optimizer["type"], args.optimizer_name) == ("rmsnorm", "SGD", "sgd")
    args = load(write(a=MODEL + "seed:\nzero_optimization: {stage: }\n"))
    assert (args.seed, args.zero_stage) == (1234, 0)


@pytest.mark.parametrize(
    "line", ["seed: true", "num_layers: 2.5", "data_path: 7", "split: [1]", "min_lr: .inf", "eval_iters: -1"]
)
def test_types_are_strict(write, line):
    text = MODEL.replace("num-layers: 2\n", "") + line
    (problem,) = [p for p in refused(write(a=text)) if "is required" not in p]
    assert message_states(problem, f"a.yml:5: {line.split(':')[0]}: expected")


def test_json_with_tabs(write):
    text = '{\n\t"num-layers": 2, "hidden_size": 64, "num_attention_heads": 4,\n'
    text += '\t"seq_length": 32,\n\t"max_position_embeddings": 16}'
    (problem,) = refused(write(a__json=text))
    assert message_states(problem, "a.json:3: seq_length: 32 max_position_embeddings 16 a.json:4")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
UNREADABLE = {
    "nested brackets": ("seed: " + "[" * 600 + "]" * 600, "a.yml:1: not valid YAML: nested 50"),
    "nested a little": ("seed: " + "[" * 60 + "]" * 60, "a.yml:1: not valid YAML: nested 50"),
    "a huge integer": ("layernorm_epsilon: 1" + "0" * 400, "a.yml:1: layernorm_epsilon: expected number"),
    "more digits than Python reads": ("seed: 1" + "0" * 5000, "a.yml:1: not valid YAML: int"),
    "no boolean": ("\nfinetune: !!bool x", "a.yml:2: not valid YAML: x bool"),
    "no time": ("save: !!timestamp x", "a.yml:1: not valid YAML: x timestamp"),
    "a name of Python": ("save: !!python/name:os.system", "a.yml:1: not valid YAML: "),
    "aliases in aliases": (BOMB, "a.yml: aliases 1,000,000"),
    "an alias of itself": ("save: &a [*a]", "a.yml:1: not valid YAML: nested 50"),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_no_yaml_reader_survives_is_one_line(write, kind):
    text, facts = UNREADABLE[kind]
    (line,) = [line for line in refused(write(a=text)) if message_states(line, facts)]
    assert "\n" not in line


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["nested brackets", "a huge integer", "no boolean", "no time", "an alias of itself"])
def test_the_same_on_the_command_line_and_from_the_environment(write, kind, monkeypatch):
    key, _, value = UNREADABLE[kind][0].strip().partition(": ")
    with pytest.raises(ConfigError, match=f"--set: {key}: "):
        load(write(a="seed: 1"), [f"{key}={value}"])
    monkeypatch.setenv("VALUE", value)
    key = "layernorm_epsilon" if key == "save" else key  # text takes anything
    with pytest.raises(ConfigError, match=f"a.yml:1: {key}: expected"):
        load(write(a=f"{key}: ${{VALUE}}"))


def test_letters_of_the_private_use_area_are_letters(write):
    text = "save: a\ue0007\ue001b\nwandb_team: \ue000${VALUE:-x}\ue001"
    values = read_files(write(a=text)).values
    assert values == {"save": "a\ue0007\ue001b", "wandb_team": "\ue000x\ue001"}
