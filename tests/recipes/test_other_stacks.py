"""docs/from-other-stacks.md: what it says there is, is there: our keys and flags, TRL's and accelerate's."""

import re
from dataclasses import fields
from functools import cache

import pytest
import yaml

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import Key, keys_of
from megatron.neox_arguments.reading.command_line import parse_deepy
from megatron.neox_arguments.validation.other_stacks import TABLES, name_here
from megatron.neox_arguments.validation.types import check_value
from megatron.pipelines.command import main as pipeline
from megatron.pipelines.command import write_recipe
from megatron.pipelines.state import State
from tests.recipes.readme import ROOT

PAGE = (ROOT / "docs/from-other-stacks.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
STAGED = "A staged pipeline: its scripts"
ROWS = [
    (section, cells[0], cells[1])
    for section, text in SECTIONS.items()
    for line in text.splitlines()
    if line.startswith("|") and not line.startswith("|---")
    for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]]
]
VALUES = {"auto", "messages", "field_messages", "offload", "deepspeed_config", "mixed_precision", "num_processes",
          "hf upload", "pt", "sft", "rm", "sources", "evaluation", "NEOX"}  # fmt: skip


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def options() -> set[str]:
    """Flags of our commands."""
    files = [*(ROOT / "tools").rglob("*.py"), ROOT / "megatron/neox_arguments/reading/command_line.py"]
    return {flag for file in files for flag in re.findall(r'"(--[\w-]+)"', file.read_text())}


def key_of(path: str) -> Key | None:
    name, *inner = path.split(".")
    key = keys_of(NeoXArgs).get(name)
    for part in inner:
        key = keys_of(key.section).get(part) if key is not None and key.section is not None else None
    return key


def problem(word: str) -> str | None:
    """Why something in backticks in the right column is not so."""
    if word in VALUES:
        return None
    if word.startswith("--"):
        return None if set(re.findall(r"--[\w-]+", word)) <= options() else "no such flag"
    if word.startswith(("python ", "bash ", "sbatch ", "torchrun ", "CUDA_VISIBLE_DEVICES")):
        scripts = re.findall(r"[\w/.-]+\.(?:py|yml|sh)", re.sub(r"MODEL.yml|RECIPE.yml|\$NEOX/", "", word))
        folders = (ROOT, ROOT / "configs/pipelines/7b")
        return next(
            (f"no {script}" for script in scripts if not any((folder / script).exists() for folder in folders)), None
        )
    if word.startswith(("tail -f ", "tensorboard --logdir ")):
        return None
    if "/" in word or word.endswith((".py", ".csv", ".yml")):
        places = [ROOT / word, ROOT / "post-training/olmo3" / word]
        if not re.match(r"[\w.]+:", word):
            return None if any(map(lambda p: p.exists(), places)) or word in ("b.csv", "main.py") else "no such file"
    path, _, value = (part.strip() for part in re.sub(r"=", ":", word, count=1).partition(":"))
    key = key_of(path)
    if key is None:
        return "no such key"
    if key.standing not in ("honoured", "honoured, differs"):
        return f"the key is {key.standing}"
    if value:
        problems = ErrorCollector({})
        read = yaml.safe_load(value)
        check_value(key, path, read, problems)
        return "; ".join(problems.lines) or key.refusal(tuple(read) if isinstance(read, list) else read)
    return None


@pytest.mark.parametrize("section", [name for name in SECTIONS if any(row[0] == name for row in ROWS)])
def test_what_is_named_here_is_here(section: str) -> None:
    wrong = [
        (word, fault)
        for table_name, _, answer in ROWS
        if table_name == section
        for word in ticked(answer)
        if (fault := problem(word))
    ]
    assert not wrong


def test_every_script_of_a_staged_pipeline_has_its_row() -> None:
    rows = [other_cell for table_name, other_cell, _ in ROWS if table_name == STAGED]
    scripts = [re.search(r"(\w+)\.(?:py|sh)", other_cell) for other_cell in rows[1:-1]]
    assert [script[1] for script in scripts if script is not None] == [
        "run_full_pipeline", "resume_pipeline", "START_PRODUCTION_TRAINING", "production_pretrain", "01_download_data",
        "02_clean_deduplicate_optimized", "03_tokenize_and_pack", "04_init_model", "05_pretrain", "07_sft", "09_dpo",
        "10_lora_finetune", "11_evaluate", "12_check_gates", "verify_gpu", "profile_memory",
    ]  # fmt: skip


@pytest.mark.parametrize("row", range(1, len([row for row in ROWS if row[0] == STAGED]) - 1))
def test_every_script_of_a_staged_pipeline_has_an_answer(row, tmp_path, monkeypatch, capsys) -> None:
    """Each command of the right column, typed: what it would do is said, of the 7B recipe as it stands."""
    write_recipe("7b", tmp_path / "pipelines/7b")
    _, other_cell, answer = [row for row in ROWS if row[0] == STAGED][row]
    commands = [word for word in ticked(answer) if word.startswith("python ")]
    assert commands, other_cell
    for command in commands:
        words = command.replace("MODEL.yml", "configs/1-3B.yml").split()
        monkeypatch.chdir(tmp_path)
        if words[1:3] == ["deepy.py", "pipeline"]:
            State(tmp_path / "pipelines/7b").write()
            is_run = words[3] in ("run", "resume")
            code = pipeline(words[3:] + ["--dry-run"] * is_run)
            streams = capsys.readouterr()
            if is_run:
                fp8 = next((flag for flag in ("--fp8", "--no-fp8") if flag in words), "")
                assert code == 0 and ": would run (" in streams.out and fp8 in streams.out, streams.err
            else:
                assert code == 1 and "has no weights to judge" in streams.err
        elif words[1] == "deepy.py" and words[2] == "train.py":
            monkeypatch.chdir(ROOT)
            assert parse_deepy(words[2:]).args.init_only
        elif "eval.py" in command:
            monkeypatch.chdir(tmp_path / "pipelines/7b")
            args = parse_deepy([word.replace("$NEOX", str(ROOT)) for word in words[2:]]).args
            assert args.check_evaluation().load == "checkpoints/sft_final"
        else:
            assert problem(command) is None


def test_keys_named_outside_tables() -> None:
    text = re.sub(r"^\|.*$", "", PAGE, flags=re.MULTILINE)
    words = [word for word in ticked(text) if re.fullmatch(r"[a-z_.]+(: \w+)?", word) and not word.endswith(".json")]
    assert "train_impl: kto" in words
    assert not [
        (word, fault) for word in words if word not in VALUES | {"trl.experimental"} and (fault := problem(word))
    ]


def trl_fields(section: str) -> set[str]:
    import trl
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.orpo import ORPOConfig

    experimental_classes = {"CPOConfig": CPOConfig, "ORPOConfig": ORPOConfig, "GKDConfig": GKDConfig}
    name = section.removeprefix("TRL: ")
    if name == "every trainer":
        from transformers import TrainingArguments

        classes = [TrainingArguments, trl.ModelConfig, trl.ScriptArguments, trl.SFTConfig]
    else:
        classes = [experimental_classes.get(name) or getattr(trl, name)]
    return {field.name for cls in classes for field in fields(cls)}


@pytest.mark.parametrize("section", [name for name in SECTIONS if name.startswith("TRL: ")])
def test_what_trl_is_said_to_have_it_has(section: str) -> None:
    listed_names = {word for table_name, other_cell, _ in ROWS if table_name == section for word in ticked(other_cell)}
    assert listed_names and listed_names <= trl_fields(section), listed_names - trl_fields(section)


def test_what_peft_and_accelerate_are_said_to_have_they_have() -> None:
    from peft import LoraConfig

    listed_names = {
        word for table_name, other_cell, _ in ROWS if table_name == "peft: LoraConfig" for word in ticked(other_cell)
    }
    assert listed_names and listed_names <= {field.name for field in fields(LoraConfig)}
    old = {
        word
        for table_name, other_cell, _ in ROWS
        if table_name.startswith("Flags that TRL")
        for word in ticked(other_cell)
    }
    assert old and not old & set().union(*(trl_fields(name) for name in SECTIONS if name.startswith("TRL: ")))
    from accelerate.commands.launch import launch_command_parser

    accelerate_options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    named_options = {
        word for table_name, other_cell, _ in ROWS if table_name == "accelerate launch" for word in ticked(other_cell)
    }
    assert named_options and named_options <= accelerate_options


@pytest.mark.parametrize(
    "config", ["SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "CPOConfig", "ORPOConfig", "GKDConfig"]
)
def test_nothing_of_trl_s_own_is_passed_over(config: str) -> None:
    """Every field that TRL adds to transformers' stands in its section, or in that of every trainer."""
    from transformers import TrainingArguments

    listed_names = {word for _, other_cell, _ in ROWS for word in ticked(other_cell)}
    excluded = {"model_init_kwargs", "dataset_kwargs", "is_encoder_decoder", "generate_during_eval", "padding_value"}
    left = trl_fields(f"TRL: {config}") - {field.name for field in fields(TrainingArguments)} - listed_names - excluded
    assert not left


@pytest.mark.parametrize(("name", "key"), [
    ("save_total_limit", "keep_last_n_checkpoints"), ("report_to", "tensorboard_dir"),
    ("logging_steps", "log_interval"), ("output_dir", "save"), ("max_seq_length", "seq_length"),
    ("gradient_checkpointing", "checkpoint_activations"),
    ("learning_rate", "optimizer.params.lr"), ("num_hidden_layers", "num_layers"), ("sequence_len", "seq_length"),
])  # fmt: skip
def test_an_unknown_key_is_answered_from_the_page(name: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        NeoXArgs.from_dict({name: 1})
    message = next(line for line in refused.value.problems if f" {name}: " in f" {line}")
    assert f"here is {key}" in message


def test_every_name_of_a_table_has_its_answer() -> None:
    """In a section too, and the page shows the same tables."""
    assert TABLES.read_text() in PAGE
    for table_name, other_cell, answer in ROWS:
        if table_name not in ("Commands", STAGED) and answer != "here":
            for name in ticked(other_cell):
                assert name_here(name.removeprefix("--")), name
    with pytest.raises(ConfigError, match=r"lora.target_modules: .*lora.target: .*peft"):
        NeoXArgs.from_dict({"lora": {"target_modules": ["q_proj"]}})
