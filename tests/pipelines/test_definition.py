"""pipeline.yml: what is refused, with file and line; and the words of the command line."""

from pathlib import Path

import pytest
import yaml

from megatron.neox_arguments import ConfigError
from megatron.pipelines.command import main, parse
from megatron.pipelines.definition import find_pipeline, read_pipeline
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.recipes import recipes, write_recipe
from tests.pipelines.small import write_small

SOURCE = "{kind: data, outputs: [x], sources: ["
REFUSED = [
    ("stages: {}", "stages: is empty"),
    ("title: x", "stages: is required"),
    ("stages: {a: {configs: [none.yml]}}", "none.yml: no such file"),
    ("stages: {a: {}}", "has no configuration"),
    ("stages: {A b: {configs: [m.yml]}}", "is no name of a stage"),
    ("stages: {a: [1]}", "expected a mapping"),
    ("stages: {a: {configs: [m.yml], start_from: b}}", "did you mean starts_from"),
    ("stages: {a: {configs: [m.yml], starts_from: b}}", "b is no earlier stage"),
    ("stages: {a: {configs: [m.yml], starts_from: a}}", "a is no earlier stage"),
    ("stages: {a: {configs: [m.yml]}, a: {configs: [m.yml]}}", "already set"),
    ("stages: {a: {kind: data, outputs: [x]}}", "neither sources nor commands"),
    ("stages: {a: {kind: data, commands: [ls]}}", "says its outputs"),
    ("stages: {a: {kind: data, outputs: [x], commands: [ls], configs: [m.yml]}}", "in a stage of kind data"),
    ("stages: {a: {kind: init, configs: [m.yml], evaluation: {eval_tasks: [x]}}}", "in a stage of kind init"),
    ("stages: {a: {kind: train, configs: [m.yml], sources: []}}", "says nothing in a stage of kind train"),
    ("stages: {a: {kind: pretrain, configs: [m.yml]}}", "expected data, init or train"),
    (f"stages: {{a: {SOURCE}{{name: x, path: y}}]}}}}", "license: is required"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT}}]}}}}", "expected one of path, url and hub, got none"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, path: y, hub: a/b}}]}}}}", "got path and hub"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, url: 'http://a/x'}}]}}}}", "needs the SHA-256"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, url: 'http://a/x', sha256: AB}}]}}}}", "64 hexadecimal digits"),
    (f"stages: {{a: {SOURCE}{{name: ../x, license: MIT, path: y}}]}}}}", "a name below data/raw"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, path: y, revision: v1}}]}}}}", "says nothing without hub"),
    (f"stages: {{a: {SOURCE}{{name: x, license: MIT, path: y}}, {{name: x, license: MIT, path: z}}]}}}}", "too"),
    (f"stages: {{a: {SOURCE}3]}}}}", "expected a list of mappings"),
    ("stages: {a: {configs: [m.yml], evaluation: {load: x}}}", "the pipeline says it"),
    ("stages: {a_final: {configs: [m.yml]}}", "no _final"),
    ("gates: none.yml\nstages: {a: {configs: [m.yml]}}", "none.yml: no such file"),
    ("stages: [a", "not valid YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=range(len(REFUSED)))
def test_refused(tmp_path, text, said):
    (tmp_path / "m.yml").write_text("num_layers: 1\n")
    (tmp_path / "pipeline.yml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_pipeline(tmp_path / "pipeline.yml")
    assert said in str(refused.value)
    assert "pipeline.yml:" in str(refused.value) or said == "stages: is required"


def test_a_pipeline_is_found_by_folder_and_by_file(tmp_path):
    folder = write_small(tmp_path / "p")
    assert find_pipeline(folder) == find_pipeline(folder / "pipeline.yml") == folder / "pipeline.yml"
    pipeline = read_pipeline(folder / "pipeline.yml")
    assert [stage.name for stage in pipeline.stages] == ["data", "init", "pretrain", "sft", "lora"]
    assert pipeline.title == "p" and pipeline.final("sft") == folder / "checkpoints/sft_final"
    with pytest.raises(PipelineError, match="pipeline init"):
        find_pipeline(tmp_path)


def test_recipes_are_written_once(tmp_path):
    assert recipes() == ["7b", "quickstart"]
    for recipe in recipes():
        folder = tmp_path / recipe
        file = write_recipe(recipe, folder)
        assert read_pipeline(file).gates == folder / "configs/promotion_gates.yml"
        for name in ("checkpoints", "data/raw", "data/packed", "data/sft", "data/dpo", "logs"):
            assert (folder / name).is_dir()
        with pytest.raises(PipelineError, match="is there already"):
            write_recipe(recipe, folder)
    with pytest.raises(PipelineError, match="there are 7b, quickstart"):
        write_recipe("8b", tmp_path / "x")


COMMANDS = [
    (["run", "none"], "none: no such pipeline"),
    (["resume", "p"], "nothing was begun here; `run` begins"),
    (["run", "p", "--from", "sft", "--to", "pretrain"], "--from sft comes after --to pretrain"),
    (["run", "p", "--only", "sfd"], "no such stage; there are data, init"),
    (["gate", "sft"], "there is none here whose stage it could be"),
    (["gate", "p"], "gate: name a stage"),
    (["gate", "p", "sft"], "has no result to judge: it is waiting"),
    (["gate", "p", "sft", "x"], "too many words"),
    (["override", "p", "sft", "--reason", "x"], "no gate refuses it: it is waiting"),
    (["init", "p"], "pipeline.yml: is there already"),
    (["resume", "p", "--only"], "--only: name the stage"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"), COMMANDS, ids=lambda given: " ".join(given) if isinstance(given, list) else ""
)
def test_refused_commands(tmp_path, monkeypatch, capsys, words, said):
    write_small(tmp_path / "p")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    assert said in capsys.readouterr().err


def test_words_for_sbatch_need_slurm(capsys):
    with pytest.raises(SystemExit):
        parse(["run", "p", "--", "--time=1"])
    assert "only --slurm" in capsys.readouterr().err
    assert parse(["run", "p", "--slurm", "--", "--time=1"]).sbatch_options == ["--time=1"]


def test_a_config_that_two_files_contradict_names_both(tmp_path, monkeypatch, capsys):
    folder = write_small(tmp_path / "p")
    given = yaml.safe_load((folder / "sft.yml").read_text())
    (folder / "sft.yml").write_text(yaml.safe_dump({**given, "hidden_size": 64}))
    monkeypatch.chdir(folder)
    assert main(["run", "."]) == 1
    said = capsys.readouterr().err
    assert "stage sft: " in said and "hidden_size" in said and "model.yml:" in said and "sft.yml:" in said


def test_state_of_a_damaged_file_is_refused(tmp_path, monkeypatch, capsys):
    folder = write_small(tmp_path / "p")
    (folder / "pipeline_state.json").write_text('{"version": 1, "sta')
    assert main(["status", str(folder)]) == 1
    assert "pipeline_state.json: cannot be read" in capsys.readouterr().err
    (folder / "pipeline_state.json").write_text('{"version": 9, "stages": {}}')
    assert main(["status", str(folder)]) == 1
    assert "is of version 9" in capsys.readouterr().err
    assert Path.cwd() == folder
