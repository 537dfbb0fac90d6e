"""Runs `python deepy.py finetune MODEL DATA`: prepares the data, chooses the configuration, trains."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from megatron.data import DataError
from megatron.data.files import replace_text, sha256, write_json
from megatron.data.indexed_dataset import IndexedDataset
from megatron.finetuning.choices import Documents, choose
from megatron.finetuning.config_file import config_text, nested
from megatron.finetuning.devices import this_device
from megatron.finetuning.formats import CHATS, JUDGED, PAIRS, TEXTS
from megatron.finetuning.rows import write_rows
from megatron.generation.prompts.chat import find_template
from megatron.neox_arguments import ConfigError, UserError
from megatron.neox_arguments import load as load_keys
from megatron.neox_arguments.reading.command_line import add_completers
from megatron.neox_arguments.reading.files import parse_overrides
from megatron.process.command_parser import CommandParser
from megatron.tokenizer import build_tokenizer

Run = Callable[[Sequence[str]], int]
"""Runs a script of the repository by its words, such as `tools/datasets/split.py`; returns the exit code."""
_COMMAND = "deepy.py finetune"
_CONFIG, _RECORD, _DATA = "finetune.yml", "finetune.json", "data"
_CHOSEN = ("seq_length", "precision", "load")  # keys of the model that a fine-tuning sets itself
_OWN_KEYS = ("save", "load", "finetune", "demo_prompts")
_COLUMNS = {CHATS: ("messages",), PAIRS: ("chosen", "rejected"), JUDGED: ("completion",), TEXTS: ("text",)}
_SIDES = {"chosen": "pos_", "rejected": "neg_"}
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


def main(argv: Sequence[str], run: Run, read_model: Callable[[str], Mapping[str, Any]]) -> int:
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
    add("--chat-template", metavar="FILE", help="Jinja chat template instead of the model's")
    add("--num_gpus", "--num-gpus", type=int, metavar="N", help="GPUs to use, or processes without GPUs")
    add("--prepare-only", action="store_true", help="stop recorded training, with OUTPUT/finetune.yml written")
    return parser


def _finetune(
    options: argparse.Namespace, argv: Sequence[str], run: Run, read_model: Callable[[str], Mapping[str, Any]]
) -> int:
    out = options.output or Path("checkpoints", f"{Path(options.model).name}-{Path(options.data).name.split('.')[0]}")
    if not _is_prepared(out, _inputs(options)):
        _prepare(out, options, argv, run, read_model)
    else:
        _say(f"{out / _CONFIG} is there already, and is used as it is")
    if options.prepare_only:
        return 0
    words = [] if options.num_gpus is None else ["--num_gpus", str(options.num_gpus)]
    code = run(["deepy.py", *words, "train.py", str(out / _CONFIG)])
    if code == 0:
        _tell_result(out)
    return code


def _say(line: str) -> None:
    print(f"finetune: {line}", flush=True)


def _inputs(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a fine-tuning is made of, to recognise it."""
    inputs: dict[str, Any] = {
        "model": options.model, "data": options.data, "valid": options.valid, "set": options.set,
        "chat_template": options.chat_template,
    }  # fmt: skip
    for name in ("data", "valid"):
        if Path(inputs[name]).is_file():
            inputs[f"digest of {name}"] = sha256(Path(inputs[name]))
    return inputs


def _is_prepared(out: Path, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the folder's configuration is written.

    Raises ConfigError if the folder is of something else.
    """
    record = out / _RECORD
    if not record.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ConfigError([f"{out}: holds files of something else; name another folder by --output"])
        return False
    recorded = json.loads(record.read_text(encoding="utf-8"))
    changed = [name for name in {**recorded, **inputs} if recorded.get(name) != inputs.get(name)]
    if changed and (out / _CONFIG).is_file():
        name = changed[0]
        raise ConfigError([
            f"{out}: was begun with another {name}: {recorded.get(name)}, now {inputs.get(name)}; "
            f"edit {out / _CONFIG}, name another folder by --output, or remove this one"
        ])  # fmt: skip
    return (out / _CONFIG).is_file()


def _prepare(
    out: Path,
    options: argparse.Namespace,
    argv: Sequence[str],
    run: Run,
    read_model: Callable[[str], Mapping[str, Any]],
) -> None:
    """Writes the data and the configuration of a fine-tuning into the folder `out`."""
    user_keys = nested({key: value for key, value, _ in parse_overrides(options.set, "--set")})
    reserved = [key for key in user_keys if key in _OWN_KEYS or key.endswith("_data_paths")]
    if reserved:
        raise ConfigError([f"--set {reserved[0]}: `finetune` sets this key itself; see --output, DATA and --valid"])
    device = this_device(options.num_gpus)
    model = dict(read_model(options.model))
    data = out / _DATA
    try:
        rows = write_rows(options.data, options.valid, _emptied(out, data, _inputs(options)))
    except DataError as problem:
        raise ConfigError([str(problem)]) from problem
    kind = rows.format.kind
    _say(f"{options.data}: {rows.format.description}; {rows.train} rows to train, {rows.valid} to validate")
    if rows.bad:
        _say(f"WARNING: {rows.bad} rows are left out; the first: {rows.problem}")
    args = load_keys([], {**model, "train_micro_batch_size_per_gpu": 1}, origin="finetune")
    tokenizer = build_tokenizer(args)
    template = None if kind == TEXTS else _template(options.chat_template, args, tokenizer, out)
    _tokenise(run, kind, data, model, rows.train, template)
    train, valid = (_documents(data / part, kind) for part in ("train", "valid"))
    model_keys = {key: value for key, value in model.items() if key not in {*_CHOSEN, *user_keys}}
    files = _data_keys(out, kind)
    choices = choose({**model_keys, **files}, tokenizer, kind, train, valid, device, user_keys)
    for reason in choices.reasons:
        _say(reason)
    load = (
        str(Path(options.model).resolve())
        if Path(options.model).is_dir()
        else f"hf://{options.model.removeprefix('hf://')}"
    )
    weights = {"load": load, "finetune": True}
    parts = {
        "the model": {**model_keys, **weights},
        "the data": files,
        "training": choices.keys,
        "results": _result_keys(out, kind, template, choices.keys),
    }
    command = ["deepy.py", "finetune", *argv]
    replace_text(out / _CONFIG, config_text(command, str(out / _CONFIG), parts, choices.reasons))
    _say(f"{out / _CONFIG}: written; every choice above is a key in it")


def _emptied(out: Path, data: Path, inputs: Mapping[str, Any]) -> Path:
    """Returns the folder of the data, without what an interrupted command left in it."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / _RECORD, inputs)
    shutil.rmtree(data, ignore_errors=True)
    return data


def _template(file: str | None, args: Any, tokenizer: Any, out: Path) -> Path | None:
    """Returns a file with the chat template; None if the model has its own, which is used."""
    if file is not None:
        args = args.replace(chat_template=file)
        find_template(args, tokenizer)
        return Path(file)
    try:
        find_template(args, tokenizer)
        return None
    except ConfigError:
        default = Path(__file__).with_name("chat_template.jinja")
        shutil.copyfile(default, out / default.name)
        _say(f"the model has no chat template; it learns that of {out / default.name}; another: --chat-template FILE")
        return out / default.name


def _tokenise(run: Run, kind: str, data: Path, model: Mapping[str, Any], rows: int, template: Path | None) -> None:
    """Writes the `.bin` and `.idx` files of both parts. Raises ConfigError if that fails."""
    workers = ["--workers", "4"] if rows > 2000 else []
    for part in ("train", "valid"):
        words = ["--input", str(data / f"{part}.jsonl"), "--output-prefix", str(data / part), *workers]
        if kind == TEXTS:
            words += ["--tokenizer-type", model["tokenizer_type"], "--vocab-file", model["vocab_file"], "--append-eod"]
            words += ["--eod-token", model["eod_token"]] if "eod_token" in model else []
            script = "preprocess_data.py"
        else:
            words += ["--tokenizer-path", model["load"]]
            words += [] if template is None else ["--chat-template", str(template)]
            words += ["--reward-key", "label", "--binary-reward"] if kind == JUDGED else []
            script = "preprocess_data_with_chat_template.py"
        if run([f"tools/datasets/{script}", *words, "--jsonl-keys", *_COLUMNS[kind]]):
            raise ConfigError([f"{data / part}.jsonl cannot be tokenised, as said above"])


def _documents(prefix: Path, kind: str) -> Documents:
    """Returns the lengths of all documents; those of both sides of pairs are added up."""
    total = sum(np.asarray(IndexedDataset(f"{prefix}_{column}_document").sizes) for column in _COLUMNS[kind])
    return Documents([int(length) for length in np.atleast_1d(total)])


def _data_keys(out: Path, kind: str) -> dict[str, Any]:
    """Returns the keys that name the tokenised files."""
    keys: dict[str, Any] = {}
    for part in ("train", "valid"):
        for column in _COLUMNS[kind]:
            path, side = out / _DATA / f"{part}_{column}", _SIDES.get(column, "")
            keys[f"{side}{part}_data_paths"] = [f"{path}_document"]
            if kind != TEXTS:
                keys[f"{side}{part}_label_data_paths"] = [f"{path}_label_document"]
            if kind == JUDGED:
                keys[f"{part}_reward_data_paths"] = [f"{path}_reward_document"]
    return keys


def _result_keys(out: Path, kind: str, template: Path | None, user_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of what the run writes beside checkpoints."""
    keys: dict[str, Any] = {"save": str(out)}
    questions = out / _DATA / "questions.jsonl"
    if questions.stat().st_size:
        keys |= {"demo_prompts": str(questions), "maximum_tokens": 128, "temperature": 0.0}
    if kind != TEXTS:
        keys["chat"] = True
    if template is not None:
        keys["chat_template"] = str(template)
    if find_spec("bokeh") is not None:
        keys["report"] = True
    elif "report" not in user_keys:
        _say("no report: bokeh is missing; pip install 'neox[report]' for a page with curves")
    return {key: value for key, value in keys.items() if key not in user_keys}


def _tell_result(out: Path) -> None:
    """Prints where the result is, and how to use it."""
    summary = json.loads((out / "training_summary.json").read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        _say(f"stopped at step {summary['iteration']} of {summary['train_iters']}; type the same command to go on")
        return
    best = summary.get("best")
    if best is not None:
        _say(f"best model: {out / 'best_model'}, {best['metric']} {best['value']:.4f} at step {best['iteration']}")
    answers = out / "demo_outputs"
    if (answers / "comparison.md").is_file():
        _say(f"answers before and after: {answers / 'comparison.md'}; the first:")
        old, new = (
            json.loads((answers / f"step{step}.jsonl").read_text(encoding="utf-8").splitlines()[0])
            for step in (0, summary["iteration"])
        )
        question = new.get("prompt") or new["messages"][-1]["content"]
        for name, text in (("question", question), ("before", old["answer"]), ("after", new["answer"])):
            print(f"    {name + ':':<10}{shorten(text, 160)}", flush=True)
    if (out / "report.html").is_file():
        _say(f"curves: {out / 'report.html'}")
    _say(f"talk to it: python deepy.py chat {out}")
