"""Runs `python deepy.py finetune MODEL DATA`: prepares the data, chooses the configuration, trains."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from megatron.data.files import sha256, write_json
from megatron.finetuning.preparation import CONFIG, ReadModel, Run, prepare
from megatron.finetuning.rows import RowSource
from megatron.neox_arguments import ConfigError, UserError
from megatron.neox_arguments.neox_args import check_assignments
from megatron.neox_arguments.reading.command_line import add_completers
from megatron.neox_arguments.reading.files import parse_overrides
from megatron.neox_arguments.values.json_text import parse_json
from megatron.process.command_parser import CommandParser

_COMMAND = "deepy.py finetune"
_RECORD = "finetune.json"  # of what a folder is made
_UNFINISHED = 1  # exit code
# Keys without a default; they stand for the model's where --set is checked before the model is read.
_REQUIRED_KEYS = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
_EXAMPLES = """\
examples:
  python deepy.py finetune HuggingFaceTB/SmolLM2-135M-Instruct chats.jsonl
  python deepy.py finetune models/base pairs.parquet --output checkpoints/mine --set train_epochs=2
  python deepy.py chat checkpoints/SmolLM2-135M-Instruct-chats                        (talk to the result)

DATA has one of these formats, which is recognised by its columns:
  chats     messages (role, content) or conversations; question and answer; instruction and output
  pairs     prompt, chosen, rejected: trained by DPO
  judged    prompt, completion, label (true or false): trained by KTO
  texts     text, or plain text files

Typed again, the command goes on where it was interrupted. OUTPUT/finetune.yml is an ordinary configuration:
edit it, and type the command again, or `python deepy.py train.py OUTPUT/finetune.yml`.
"""


def main(argv: Sequence[str], run: Run, read_model: ReadModel) -> int:
    """Fine-tunes as the command line says, and returns the exit code.

    run: runs another script. read_model: returns the configuration keys of a HuggingFace model.
    """
    parser = _parser()
    add_completers(parser, None)
    options = parser.parse_intermixed_args(argv)
    try:
        return _finetune(options, argv, run, read_model)
    except UserError as problem:
        sys.stderr.write(problem.error_lines(_COMMAND))
    except OSError as problem:  # a file or folder cannot be read or written
        if problem.filename is None:
            raise
        sys.stderr.write(ConfigError([f"{problem.filename}: {problem.strerror}"]).error_lines(_COMMAND))
    return 1


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_COMMAND, epilog=_EXAMPLES,
        description="Fine-tune a HuggingFace model on a file of chats, pairs of answers, judged answers or texts. What "
        "is not set by --set is chosen for this machine, and every choice is printed.",
    )  # fmt: skip
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder of a HuggingFace model, or its name on the Hub")
    add("data", metavar="DATA", help="JSONL, JSON, CSV, Parquet or text files, or the name of a dataset on the Hub")
    add("--output", type=Path, metavar="DIR", help="folder of the result; default: checkpoints/MODEL-DATA")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="keys of the configuration")
    add(
        "--valid",
        default="0.05",
        metavar="SHARE|N|FILE",
        help="rows for validation: a share of DATA, a number of its rows, or another file; default: 0.05",
    )
    add("--split", metavar="NAME", help="split of a dataset that has several, such as train; train[:5000] takes rows")
    add("--subset", metavar="NAME", help="configuration of a dataset that has several")
    add("--chat-template", metavar="FILE", help="Jinja chat template instead of the model's")
    add("--num_gpus", "--num-gpus", type=int, metavar="N", help="GPUs to use, or processes without GPUs")
    add("--prepare-only", action="store_true", help="stop before training, with OUTPUT/finetune.yml written")
    return parser


def _finetune(options: argparse.Namespace, argv: Sequence[str], run: Run, read_model: ReadModel) -> int:
    out = options.output or Path("checkpoints", f"{Path(options.model).name}-{Path(options.data).name.split('.')[0]}")
    source = RowSource(options.data, options.valid, options.split, options.subset)
    model_keys = [(key, 1, "MODEL") for key in _REQUIRED_KEYS]
    check_assignments([*model_keys, *parse_overrides(options.set, "--set")])
    inputs = _inputs(options)
    if _is_prepared(out, inputs):
        _say(f"{out / CONFIG} is there already, and is used as it is")
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / _RECORD, inputs)
        prepare(
            out.resolve(), options.model, source, options.set, options.chat_template,
            options.num_gpus, ["deepy.py", "finetune", *argv], run, read_model, _say,
        )  # fmt: skip
    if options.prepare_only:
        return 0
    words = [] if options.num_gpus is None else ["--num_gpus", str(options.num_gpus)]
    code = run(["deepy.py", *words, "train.py", str(out / CONFIG)])
    return code or _tell_result(out)


def _say(line: str) -> None:
    print(f"finetune: {line}", flush=True)


def _inputs(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a fine-tuning is made of, to recognise it however it is typed."""
    inputs: dict[str, Any] = {
        "model": options.model, "data": options.data, "valid": options.valid, "split": options.split,
        "subset": options.subset, "chat_template": options.chat_template,
        "set": {key: value for key, value, _ in parse_overrides(options.set, "--set")},
    }  # fmt: skip
    for name in ("model", "data", "valid", "chat_template"):
        if inputs[name] is not None and Path(inputs[name]).exists():
            inputs[name] = str(Path(inputs[name]).resolve())
            if Path(inputs[name]).is_file():
                inputs[f"digest of {name}"] = sha256(Path(inputs[name]))
    return parse_json(json.dumps(inputs, default=str))


def _is_prepared(out: Path, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the folder's configuration is written for these inputs.

    Raises ConfigError if the folder is of something else.
    """
    record, config = out / _RECORD, out / CONFIG
    if not record.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError([f"{out}: holds files of something else; name another folder by --output"])
        return False
    try:
        recorded = parse_json(record.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise ConfigError([f"{record}: is damaged; remove the folder, or name another one by --output"]) from cause
    changed = [name for name in {**recorded, **inputs} if recorded.get(name) != inputs.get(name)]
    if not changed or not config.is_file():
        return config.is_file()
    for name in ("model", "data"):
        if "/" not in inputs[name] and not Path(inputs[name]).exists():  # names on the Hub have a slash
            raise ConfigError([f"{name.upper()} {inputs[name]}: no such file or folder"])
    change = _change(changed[0], recorded, inputs)
    if (out / "latest").exists():
        remedy = f"edit {config}, or " if changed[0] == "set" else ""
        raise ConfigError([f"{out}: {change}; {remedy}name another folder by --output, or remove this one"])
    old_config = config.with_suffix(".old.yml")
    config.rename(old_config)
    _say(f"prepared anew: {change}; {old_config} is the configuration of before")
    return False


def _change(name: str, recorded: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """Returns in words what a fine-tuning was begun with, and what is asked for now. name: of the input."""
    if name.startswith("digest of "):
        changed_file = inputs[name.removeprefix("digest of ")]
        return f"was begun with {changed_file}, which has changed since"
    label = name.upper() if name in ("model", "data") else f"--{name.replace('_', '-')}"
    return f"was begun with {label} {_words(recorded.get(name))}, and now it is {_words(inputs.get(name))}"


def _words(value: str | Mapping[str, Any] | None) -> str:
    """Returns an input as it is typed; `set` is a mapping."""
    if isinstance(value, Mapping):
        value = " ".join(f"{key}={part}" for key, part in value.items())
    return value or "nothing"


def _tell_result(out: Path) -> int:
    """Prints where the result is, and how to use it. Returns the exit code."""
    summary = parse_json((out / "training_summary.json").read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        _say(f"stopped at step {summary['iteration']} of {summary['train_iters']}; type the same command to go on")
        return _UNFINISHED
    best = summary.get("best")
    if best is not None:
        _say(f"best model: {out / 'best_model'}, {best['metric']} {best['value']:.4f} at step {best['iteration']}")
    answers = out / "demo_outputs"
    if (answers / "comparison.md").is_file():
        _say(f"answers before and after: {answers / 'comparison.md'}; the first:")
        old, new = (
            parse_json((answers / f"step{step}.jsonl").read_text(encoding="utf-8").splitlines()[0])
            for step in (0, summary["iteration"])
        )
        question = new.get("prompt") or new["messages"][-1]["content"]
        for name, text in (("question", question), ("before", old["answer"]), ("after", new["answer"])):
            print(f"    {name + ':':<10}{shorten(text, 160)}", flush=True)
    if (out / "report.html").is_file():
        _say(f"curves: {out / 'report.html'}")
    _say(f"talk to it: python deepy.py chat {out}")
    return 0
