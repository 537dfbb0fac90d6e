"""pipeline.yml: what is refused, with file and line; and the words of the command line."""

import re
import shutil
from pathlib import Path

import pytest

from megatron.neox_arguments import ConfigError
from megatron.pipelines.command import main, parse, recipes, write_recipe
from megatron.pipelines.definition import find_pipeline, read_pipeline
from megatron.pipelines.errors import PipelineError
from tests.pipelines.small import change_yaml, write_small

SOURCE = "{kind: data, outputs: [x], sources: ["
REFUSED = [
    ("stages: {}", "stages: is empty"),
    ("title: x", "stages: is required"),
    ("stages: {a: {configs: [none.yml]}}", "none.yml: no such file"),
    ("stages: {a: {}}", "has no configuration"),
    ("stages: {A b: {configs: [m.yml]}}", "invalid stage name"),
    ("stages: {a: [1]}", "expected a mapping"),
    ("stages: {a: {configs: [m.yml], start_from: b}}", "did you mean starts_from"),
    ("stages: {a: {configs: [m.yml], starts_from: b}}", "b is not an earlier stage"),
    ("stages: {a: {configs: [m.yml], starts_from: a}}", "a is not an earlier stage"),
    ("stages: {a: {configs: [m.yml]}, a: {configs: [m.yml]}}", "already set"),
    ("stages: {a: {kind: data, outputs: [x]}}", "neither sources nor commands"),
    ("stages: {a: {kind: data, commands: [ls]}}", "has no outputs"),
    ("stages: {a: {kind: data, outputs: [x], commands: [ls], configs: [m.yml]}}", "in a stage of kind data"),
    ("stages: {a: {kind: init, configs: [m.yml], evaluation: {eval_tasks: [x]}}}", "in a stage of kind init"),
    ("stages: {a: {kind: train, configs: [m.yml], sources: []}}", "no effect in a stage of kind train"),
    ("stages: {a: {kind: pretrain, configs: [m.yml]}}", "expected data, init or train"),
    (f"stages: {{a: {SOURCE}{{name: x, path: y}}]}}}}", "license: is required"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT}}]}}}}", "exactly one of path, url and hub, got none"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, path: y, hub: a/b}}]}}}}", "path and hub"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, url: 'http://a/x'}}]}}}}", "set sha256 to"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, url: 'http://a:b@c/x'}}]}}}}", "x: a user or password"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, url: 'http://a/x', sha256: AB}}]}}}}", "64 hexadecimal digits"),
    (f"stages: {{a: {SOURCE}{{name: ../x, license: MIT, path: y}}]}}}}", "a path below data/raw"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, path: y, revision: v1}}]}}}}", "no effect without hub"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, path: y}}, {{name: x, license: MIT, path: z}}]}}}}", "too"),
    (f"stages: {{a: {SOURCE}3]}}}}", "expected a list of mappings"),
    ("stages: {a: {configs: [m.yml], evaluation: {load: x}}}", "pipeline sets this key"),
    ("stages: {a_final: {configs: [m.yml]}}", "with _final"),
    ("gates: none.yml\nstages: {a: {configs: [m.yml]}}", "none.yml: no such file"),
    ("stages: [a", "not valid YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(tmp_path, text, message):
    (tmp_path / "m.yml").write_text("num_layers: 1\n")
    (tmp_path / "pipeline.yml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_pipeline(tmp_path / "pipeline.yml")
    assert message in str(refused.value)
    assert "pipeline.yml:" in str(refused.value) or message == "stages: is required"


def test_pipelines_are_found_and_recipes_written_once(tmp_path):
    folder = write_small(tmp_path / "p")
    assert find_pipeline(folder) == find_pipeline(folder / "pipeline.yml") == folder / "pipeline.yml"
    pipeline = read_pipeline(folder / "pipeline.yml")
    assert [stage.name for stage in pipeline.stages] == ["data", "init", "pretrain", "sft", "lora"]
    assert pipeline.title == "p" and pipeline.final("sft") == folder / "checkpoints/sft_final"
    with pytest.raises(PipelineError, match="pipeline init"):
        find_pipeline(tmp_path)
    assert recipes() == ["7b", "quickstart"]
    for recipe in recipes():
        folder = tmp_path / recipe
        assert read_pipeline(write_recipe(recipe, folder)).gates == folder / "configs/promotion_gates.yml"
        for name in ("checkpoints", "data/raw", "data/packed", "data/sft", "data/dpo", "logs"):
            assert (folder / name).is_dir()
        with pytest.raises(PipelineError, match="already exists"):
            write_recipe(recipe, folder)
    with pytest.raises(PipelineError, match="choose one of 7b, quickstart"):
        write_recipe("8b", tmp_path / "x")


@pytest.mark.parametrize(("words", "message"), [
    ("run none", "none: no such file; to create a pipeline"),
    ("resume p", "`run`"),
    ("run p --from sft --to pretrain", "--from sft comes after --to pretrain"),
    ("run p --only sfd", "no such stage; .*data, init"),
    ("gate sft", "neither this folder nor sft has a pipeline.yml"),
    ("gate p", "gate: "),
    ("gate p sft", "status: waiting"),
    ("gate p sft x", "too many arguments"),
    ("override p sft --reason x", "status: waiting"),
    ("init p", "pipeline.yml: .*already"),
    ("resume p --only", "--only: "),
])  # fmt: skip
def test_refused_commands(tmp_path, monkeypatch, capsys, words, message):
    write_small(tmp_path / "p")
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 1
    assert re.search(message, capsys.readouterr().err)


def test_words_for_sbatch_and_damaged_states_are_refused(capsys, tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        parse(["run", "p", "--", "--time=1"])
    assert "add --slurm" in capsys.readouterr().err
    assert parse(["run", "p", "--slurm", "--", "--time=1"]).sbatch_options == ["--time=1"]
    folder = write_small(tmp_path / "p")
    for text, message in (
        ('{"version": 1, "sta', "pipeline cannot be read"),
        ('{"version": 9, "stages": {}}', "has version 9"),
    ):
        (folder / "pipeline_state.json").write_text(text)
        assert main(["status", str(folder)]) == 1 and message in capsys.readouterr().err
    assert Path.cwd() == folder


def test_what_a_run_would_refuse_is_said_before_anything_runs(tmp_path, capsys):
    """Not after hours of training."""
    folder = write_small(tmp_path / "p")

    def error_of(*words: object) -> str:
        assert main([str(word) for word in words]) == 1
        assert not (folder / "logs").exists()
        return capsys.readouterr().err

    change_yaml(folder / "sft.yml", hidden_size=64)
    change_yaml(folder / "lora.yml", train_itres=5)
    text, facts = error_of("run", folder), ("stage sft: ", "hidden_size", "model.yml:", "sft.yml:")
    assert all(fact in text for fact in (*facts, "stage lora: ", "train_itres", "train_iters"))
    write_small(folder)
    requirements = [{"metric": "validation/lm_loss", "max": 1.0}, {"metric": "eval_tasks/piqa_acc", "min": 0.5}]
    change_yaml(folder / "gates.yml", sft={"require": requirements})
    text = error_of("run", folder)
    assert re.search("sft: validation/lm_loss will .*eval_iters", text) and re.search("sft: eval_tasks/piqa_acc ", text)
    shutil.copy(write_small(folder) / "pipeline.yml", folder / "other.yml")
    (folder / "pipeline_state.json").write_text('{"version": 1, "file": "pipeline.yml", "stages": {}}')
    for words, fact in (
        (("run", folder / "other.yml"), "is used by the pipeline pipeline.yml"),
        (("run", folder, "--only", "sft", "--from", "pretrain"), "--from"),
        (("resume", folder, "sft", "--from", "lora"), "one of them"),
        (("run", folder, "--set", "save=x"), "save"),
    ):
        assert fact in error_of(*words)
