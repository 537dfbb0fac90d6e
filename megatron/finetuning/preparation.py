"""Prepares a fine-tuning: writes its data and its configuration into a folder."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import DataError
from megatron.data.files import replace_text
from megatron.data.indexed_dataset import IndexedDataset
from megatron.finetuning.choices import Documents, choose
from megatron.finetuning.config_file import config_text, nested
from megatron.finetuning.devices import this_device
from megatron.finetuning.formats import CHATS, JUDGED, PAIRS, TEXTS
from megatron.finetuning.rows import RowSource, write_rows
from megatron.generation.prompts.chat import find_template
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments import load as load_keys
from megatron.neox_arguments.neox_args import check_assignments
from megatron.neox_arguments.reading.files import parse_overrides
from megatron.tokenizer import Tokenizer, build_tokenizer

Run = Callable[[Sequence[str]], int]
"""Runs a script of the repository by its words, such as `tools/datasets/split.py`; returns the exit code."""
ReadModel = Callable[[str], Mapping[str, Any]]
"""Returns the configuration keys of a HuggingFace model."""
CONFIG, DATA = "finetune.yml", "data"
_CHOSEN = ("seq_length", "precision", "load")  # keys of the model that a fine-tuning sets itself
_OWN_KEYS = ("save", "load", "finetune")
_COLUMNS = {CHATS: ("messages",), PAIRS: ("chosen", "rejected"), JUDGED: ("completion",), TEXTS: ("text",)}
_SIDES = {"chosen": "pos_", "rejected": "neg_"}
_FEW_ROWS = 200
_NOUNS = {CHATS: "chats", PAIRS: "pairs", JUDGED: "judged answers", TEXTS: "texts"}


def prepare(
    out: Path, model: str, source: RowSource, settings: Sequence[str], chat_template: str | None,
    num_gpus: int | None, command: Sequence[str], run: Run, read_model: ReadModel, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Writes the data and the configuration of a fine-tuning into the folder `out`.

    model, source, settings, chat_template, num_gpus: of the command line (command.py). command: its
    words. say: called with lines for people. Raises ConfigError for what cannot be used; then no
    configuration is written.
    """
    overrides = parse_overrides(settings, "--set")
    user_keys = nested({key: value for key, value, _ in overrides})
    reserved = [key for key in user_keys if key in _OWN_KEYS or key.endswith("_data_paths")]
    if reserved:
        raise ConfigError([f"--set {reserved[0]}: `finetune` sets this key itself; see --output, DATA and --valid"])
    device = this_device(num_gpus)
    keys_of_model = _model_keys(model, read_model)
    check_assignments([*((key, value, "MODEL") for key, value in keys_of_model.items()), *overrides])
    args = load_keys([], {**keys_of_model, "train_micro_batch_size_per_gpu": 1}, "finetune")
    try:
        shutil.rmtree(out / DATA, ignore_errors=True)  # what an interrupted command left
        rows = write_rows(source, out / DATA)
    except DataError as problem:
        raise ConfigError([str(problem)]) from problem
    kind = rows.format.kind
    say(f"{source.data}: {rows.format.description}; {rows.train} {_NOUNS[kind]} to train, {rows.valid} to validate")
    if rows.bad:
        say(f"WARNING: rows left out: {rows.bad}; the first: {rows.problem}")
    if rows.train < _FEW_ROWS and kind != TEXTS:
        say(
            f"WARNING: {rows.train} {_NOUNS[kind]} are few; a model learns little from less than some hundreds; more "
            "epochs help (--set train_epochs=5)"
        )
    tokenizer = build_tokenizer(args)
    template = None if kind == TEXTS else _template(chat_template, args, tokenizer, out, say)
    _tokenise(run, kind, out / DATA, keys_of_model, rows.train, template)
    train, validation = (_documents(out / DATA / part, kind) for part in ("train", "valid"))
    model_keys = {key: value for key, value in keys_of_model.items() if key not in {*_CHOSEN, *user_keys}}
    files = _data_keys(out, kind)
    choices = choose({**model_keys, **files}, tokenizer, kind, train, validation, device, user_keys)
    parts = {
        "the model": {**model_keys, "load": _weights(model), "finetune": True},
        "the data": files,
        "training": choices.keys,
        "results": _result_keys(out, kind, template, choices.keys, say),
    }
    # What train.py would refuse is refused here, before anything is written.
    load_keys([], {key: value for part in parts.values() for key, value in part.items()}, "finetune").check_training()
    for reason in choices.reasons:
        say(reason)
    replace_text(out / CONFIG, config_text(command, str(out / CONFIG), parts, choices.reasons))
    say(f"{out / CONFIG}: written; every choice above is a key in it")


def _model_keys(model: str, read_model: ReadModel) -> dict[str, Any]:
    """Returns the keys of a model, with absolute paths. Raises ConfigError if it is none."""
    best = Path(model) / "best_model"
    if best.is_dir():
        raise ConfigError([f"MODEL {model}: is the folder of a run; name its best model, {best}"])
    try:
        keys = dict(read_model(model))
    except ConfigError as cause:
        raise ConfigError([problem.replace("--hf-model:", "MODEL:") for problem in cause.problems]) from cause
    if "vocab_file" in keys:
        keys["vocab_file"] = str(Path(keys["vocab_file"]).resolve())
    return keys


def _weights(model: str) -> str:
    """Returns the value of `load`: the model's folder, or its name on the Hub."""
    return str(Path(model).resolve()) if Path(model).is_dir() else f"hf://{model.removeprefix('hf://')}"


def _template(
    file: str | None, args: NeoXArgs, tokenizer: Tokenizer, out: Path, say: Callable[[str], None]
) -> Path | None:
    """Returns a file with the chat template; None if the model has its own, which is used."""
    if file is not None:
        find_template(args.replace(chat_template=file), tokenizer)
        return Path(file).resolve()
    try:
        find_template(args, tokenizer)
        return None
    except ConfigError:
        default = Path(__file__).with_name("chat_template.jinja")
        shutil.copyfile(default, out / default.name)
        say(f"the model has no chat template; it learns that of {out / default.name}; another: --chat-template FILE")
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
            path, side = out / DATA / f"{part}_{column}", _SIDES.get(column, "")
            keys[f"{side}{part}_data_paths"] = [f"{path}_document"]
            if kind != TEXTS:
                keys[f"{side}{part}_label_data_paths"] = [f"{path}_label_document"]
            if kind == JUDGED:
                keys[f"{part}_reward_data_paths"] = [f"{path}_reward_document"]
    return keys


def _result_keys(
    out: Path, kind: str, template: Path | None, user_keys: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the keys of what the run writes beside checkpoints."""
    keys: dict[str, Any] = {"save": str(out)}
    questions = out / DATA / "questions.jsonl"
    if questions.stat().st_size:
        keys |= {"demo_prompts": str(questions), "maximum_tokens": 128, "temperature": 0.0}
    if kind != TEXTS:
        keys["chat"] = True
    if template is not None:
        keys["chat_template"] = str(template)
    if find_spec("bokeh") is not None:
        keys["report"] = True
    elif "report" not in user_keys:
        say("no report: bokeh is missing; pip install 'neox[report]' for a page with curves")
    return {key: value for key, value in keys.items() if key not in user_keys}
