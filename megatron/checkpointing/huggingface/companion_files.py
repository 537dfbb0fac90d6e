"""Reads and writes companion files of a HuggingFace model: tokenizer, chat templates, processors, terms of
use.

An imported model keeps them in `huggingface/` of its checkpoints. Training copies them into every later
checkpoint, so that an export has them unchanged.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.field_types import check_fields
from megatron.checkpointing.families.multimodal import text_config
from megatron.checkpointing.huggingface.folder import LEGAL, TEMPLATES
from megatron.checkpointing.huggingface.model_files import CONFIG, read_config, read_json
from megatron.checkpointing.tensor_files import FileRecord, write_bytes
from megatron.data.files import sync
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.json_text import parse_json
from megatron.tokenizer import Tokenizer, TokenizerError, build_tokenizer, make_tokenizer

HF_SUBFOLDER = "huggingface"
GENERATION, CARD = "generation_config.json", "README.md"
CHAT_TEMPLATE = "chat_template.jinja"
# Names that transformers and Mistral use. Additional chat templates are in a folder.
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", CHAT_TEMPLATE, "chat_template.json", f"{TEMPLATES}/*.jinja",
    "tokenizer.*.json", "tokenizer.model.v*", "tekken.json", "tiktoken.model", "*.tiktoken", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
# Processors of images and sound, and Mistral's system prompt.
_PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", "*SYSTEM_PROMPT.txt",
)  # fmt: skip
_OBJECTS = (
    CONFIG,
    GENERATION,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)  # each a JSON object
_ROLES = ("bos", "eos", "pad")


@dataclass(frozen=True)
class CompanionFiles:
    """The files of an export other than weights, and facts for its config.json and README.md.

    files: content of each file, by name.
    ids: `bos_token_id`, `eos_token_id` and `pad_token_id` for config.json.
    vocab_size: rows of the embedding before padding; None if unknown.
    tokens: number of tokens of the tokenizer; None if there is no tokenizer.
    config, card: config.json and README.md of the imported model; empty if the model was not imported. If it
        is multimodal, config is the language model's, and full_config is the multimodal model's.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    tokens: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    card: str = ""
    full_config: Mapping[str, Any] = field(default_factory=dict)


def read_companion_files(folder: str | Path, tokenizer: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """Returns the files of a HuggingFace folder that a checkpoint keeps (config, tokenizer, ...): content by
    name.

    tokenizer: content of the run's tokenizer files, by name; if its tokenizer.json differs from the folder's,
        the folder's tokenizer files are left out. Raises CheckpointError if a JSON file is not an object, or
        if config.json or generation_config.json has a field of the wrong type."""
    path = Path(folder)
    patterns = (CONFIG, GENERATION, CARD, *_TOKENIZER, *_PROCESSORS, *LEGAL)
    paths = dict.fromkeys(file for pattern in patterns for file in sorted(path.glob(pattern)) if file.is_file())
    files = {file.relative_to(path).as_posix(): file.read_bytes() for file in paths}
    for name in _OBJECTS:
        if name in files:
            content = read_config(path) if name == CONFIG else read_json(path / name)
            if name == GENERATION:
                check_fields(content, str(path / name))
    if tokenizer is not None and tokenizer.get("tokenizer.json") != files.get("tokenizer.json"):
        return {name: content for name, content in files.items() if not is_of_tokenizer(name)}
    return files


def run_companion_files(folder: Path | None, tokenizer: Mapping[str, bytes], args: NeoXArgs) -> Mapping[str, bytes]:
    """Returns the companion files of a run, content by name. The file `chat_template` replaces the template.

    folder: of the model that the run begins with, as for `read_companion_files`; None: it was not imported.
    tokenizer: files of the run's tokenizer. Raises ConfigError if the template cannot be read."""
    files = read_companion_files(folder, tokenizer) if folder is not None else {}
    if args.chat_template is None or not any(map(is_of_tokenizer, files)):
        return files
    try:
        return {**files, CHAT_TEMPLATE: Path(args.chat_template).read_bytes()}
    except OSError as cause:
        raise args.error("chat_template", f"{args.chat_template}: cannot be read ({cause.strerror})") from cause


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer; chat templates do."""
    return any(fnmatchcase(name, pattern) for pattern in _TOKENIZER)


def write_companion_files(files: Mapping[str, bytes], folder: Path, prefix: str = "") -> list[FileRecord]:
    """Write files into `folder`, which is created if missing, sync them to disk, and return their records.

    files: content by name; a name may contain a folder. prefix: put before the names in the records. Raises
        CheckpointError if a file cannot be written."""
    records = []
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        records.append(write_bytes(content, folder / name, prefix + name))
    for place in {(folder / name).parent for name in files}:
        sync(place)
    return records


def check_tokens(files: Mapping[str, bytes], rows: int, source: str) -> None:
    """Raise CheckpointError if a tokenizer has token ids beyond the rows of the embedding.

    files: content by name; tokens come from tokenizer.json, else from vocab.json and added_tokens.json.
    rows: number of rows of the embedding. source: name of the model, for the error."""
    for name in ("tokenizer.json", "vocab.json"):
        if name not in files:
            continue
        try:
            ids = _ids(parse_json(files[name]), parse_json(files.get("added_tokens.json", b"{}")))
            without_row = sorted((token_id, token) for token, token_id in ids.items() if token_id >= rows)
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise CheckpointError(f"{source}: {name} cannot be read ({type(problem).__name__}: {problem})") from problem
        if without_row:
            raise CheckpointError(
                f"{source}: {name} has {without_row[-1][0] + 1} token ids, but the embedding has {rows} rows "
                f"(vocab_size): {without_row[0][1]!r} (id {without_row[0][0]}) has no row; remove such tokens in a "
                "copy of the folder, or `load` the folder in a run, which adds rows"
            )
        return


def _ids(content: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, int]:
    """Returns {token: id} of a tokenizer.

    content: parsed tokenizer.json or vocab.json. added: parsed added_tokens.json."""
    if "model" not in content or isinstance(content["model"], int):  # vocab.json may have a token "model"
        return {**content, **added}
    vocab = content["model"].get("vocab") or {}
    if not isinstance(vocab, dict):  # a unigram model has [token, score] entries in the order of ids
        vocab = {entry[0]: token_id for token_id, entry in enumerate(vocab)}
    return {**vocab, **_added_ids(content)}


def reads_same_tokens(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether a HuggingFace folder's tokenizer has the same ids for the same tokens as `tokenizer`.

    Compares the files byte by byte; if they differ, the vocabularies and added tokens of tokenizer.json.
    Raises CheckpointError unless both have a tokenizer.json, or both a tokenizer.model."""
    files = tokenizer.files()
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file() and name in files:
            content = (folder / name).read_bytes()
            return content == files[name] or name == "tokenizer.json" and _tokens(content) == _tokens(files[name])
    raise CheckpointError(
        f"{folder}: its tokenizer cannot be compared with this run's {type(tokenizer).__name__}: both need a "
        "tokenizer.json, or both a tokenizer.model"
    )


def _tokens(content: bytes) -> tuple[Any, dict[str, int]]:
    """Returns (vocabulary, {added token: id}) of a tokenizer.json. content: the bytes of the file."""
    parsed = parse_json(content)
    return parsed["model"].get("vocab"), _added_ids(parsed)


def _added_ids(tokenizer_json: Mapping[str, Any]) -> dict[str, int]:
    return {token["content"]: token["id"] for token in tokenizer_json.get("added_tokens", ())}


def exported_vocab_size(carried: Mapping[str, bytes], tokens: int) -> int | None:
    """Returns how many vocabulary rows to export: vocab_size of the imported config.json; None: all rows.

    The result is at least `tokens`. carried: content of the checkpoint's HuggingFace files, by name. tokens:
    number of tokens of the checkpoint's tokenizer."""
    rows = text_config(parse_json(carried.get(CONFIG, b"{}"))).get("vocab_size")
    return None if rows is None else max(rows, tokens)


def declared_eos_ids(carried: Mapping[str, bytes]) -> tuple[int, ...]:
    """Returns the token ids that end a text: `eos_token_id` of generation_config.json, else of config.json.

    carried: content of a model's HuggingFace files, by name."""
    file = GENERATION if GENERATION in carried else CONFIG
    eos = text_config(parse_json(carried.get(file, b"{}"))).get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


def companion_files_of(
    source: Path,
    args: NeoXArgs,
    *,
    tokenizer: bool = True,
    vocab_is_hf: bool = False,
    pad_token_id: int | None = None,
    scores: bool = False,
) -> CompanionFiles:
    """Returns the files other than weights for an export of checkpoint `source`: tokenizer, chat templates,
    ...

    The files come from the imported model, else from the run's tokenizer or `vocab_file`.
    tokenizer: false leaves the tokenizer's files out.
    vocab_is_hf: `vocab_file` is a folder or a name on the Hub.
    pad_token_id: replaces the tokenizer's.
    scores: the model is a reward model. transformers reads its score at the last token that is not padding,
        so its pad token must not end texts; without `pad_token_id`, another special token is then chosen.
    Raises CheckpointError for a tokenizer that cannot be read, or without a suitable pad token."""
    saved_files = read_companion_files(source / HF_SUBFOLDER)
    full_config, card = parse_json(saved_files.pop(CONFIG, b"{}")), saved_files.pop(CARD, b"").decode(errors="replace")
    config = text_config(full_config)
    files, ids, tokens = dict(saved_files), {}, None
    carried, built_tokenizer = any(map(is_of_tokenizer, files)), None
    if not carried and tokenizer:
        files |= _run_tokenizer_files(source, args, vocab_is_hf)
    if "tokenizer.json" in files and tokenizer:
        built_tokenizer = _built(files, args)
        tokens = built_tokenizer.vocab_size
        ids = {f"{role}_token_id": getattr(built_tokenizer, role) for role in _ROLES}
        if "tokenizer_config.json" not in files:
            files["tokenizer_config.json"] = _tokenizer_config(built_tokenizer)
    if not tokenizer:
        files = {name: content for name, content in files.items() if not is_of_tokenizer(name)}
    if carried or not ids:  # config.json may list several EOS ids
        ids |= {key: config[key] for key in (f"{role}_token_id" for role in _ROLES) if config.get(key) is not None}
    if scores:
        pad_token_id = _pad_of_scores(source, ids, built_tokenizer, pad_token_id)
    if pad_token_id is not None:
        ids["pad_token_id"] = pad_token_id
        files = _with_pad(files, pad_token_id)
    if scores:
        files.pop(GENERATION, None)
    elif GENERATION not in files:
        files[GENERATION] = _json({"_from_model_config": True, **{key: v for key, v in ids.items() if v is not None}})
    return CompanionFiles(files, ids, config.get("vocab_size"), tokens, config, card, full_config)


def _pad_of_scores(source: Path, ids: Mapping[str, Any], tokenizer: Tokenizer | None, requested: int | None) -> int:
    """Returns a reward model's pad token id, which must not be the id of a token that ends texts.

    ids: token ids for config.json. requested: the user's choice; None: choose one. Raises CheckpointError if
        no id is suitable."""
    eos = ids.get("eos_token_id")
    ends, choices = {*(eos if isinstance(eos, list) else [eos])}, [ids.get("pad_token_id")]
    if tokenizer is not None:
        ends |= {tokenizer.eod, tokenizer.eos}
        choices += [i for i in tokenizer.special_tokens if i != tokenizer.bos] + [tokenizer.bos]
    pads = [i for i in (choices if requested is None else [requested]) if i is not None and i not in ends]
    if not pads:
        reason = (
            "its tokenizer has no token for padding" if requested is None else f"--pad-token-id {requested} ends texts"
        )
        raise CheckpointError(
            f"{source}: {reason}, but transformers reads a reward model's score at the last token before padding; "
            "give the id of a token that does not end texts with --pad-token-id"
        )
    return pads[0]


def _run_tokenizer_files(source: Path, args: NeoXArgs, vocab_is_hf: bool) -> dict[str, bytes]:
    """Returns content of the run's tokenizer files by name, from checkpoint `source` or `vocab_file`.

    vocab_is_hf: `vocab_file` is a name that transformers can load."""
    place = Path(args.vocab_file) if args.vocab_file else None
    folder_files = {}
    if place is not None:
        folder_files = read_companion_files(place if place.is_dir() else place.parent)
        folder_files = {
            name: content for name, content in folder_files.items() if is_of_tokenizer(name) or name == GENERATION
        }
    saved_files = read_companion_files(source / "tokenizer")
    if saved_files:
        is_same = folder_files.get("tokenizer.json") == saved_files.get("tokenizer.json")
        return {**saved_files, **(folder_files if is_same else {})}
    if vocab_is_hf:
        return _from_transformers(str(args.vocab_file), "vocab_file: ")
    if place is None:
        return {}  # imported without a tokenizer, or transformers cannot read this kind from a file
    if place.is_dir() and folder_files:
        return folder_files
    try:
        built_files = build_tokenizer(args).files()
    except TokenizerError as problem:
        text = f"the tokenizer cannot be fetched: {problem}; or leave it out with --no_save_tokenizer"
        raise CheckpointError(text) from problem
    tokenizer_files = {name: content for name, content in built_files.items() if is_of_tokenizer(name)}
    if "tokenizer.json" in tokenizer_files and place.name == "tokenizer.json":
        tokenizer_files = {**tokenizer_files, **folder_files}
    if "vocab.json" in tokenizer_files:
        tokenizer_files["tokenizer_config.json"] = _json({"tokenizer_class": "GPT2Tokenizer"})
    return tokenizer_files


def add_tokenizer(folder: Path, tokenizer: str) -> None:
    """Add a tokenizer to a HuggingFace folder that has none.

    tokenizer: a folder, a file like tokenizer.json, or a name on the Hub. Raises CheckpointError, also if a
        token id is beyond the rows of the embedding."""
    place = Path(tokenizer)
    if place.is_dir():
        files = read_companion_files(place)
    elif place.is_file():
        files = _tokenizer_file(place)
    else:
        files = _from_transformers(tokenizer)
    files = {name: content for name, content in files.items() if is_of_tokenizer(name)}
    if not files:
        raise CheckpointError(f"{tokenizer}: holds no tokenizer (no tokenizer.json or tokenizer.model)")
    check_tokens(files, text_config(parse_json((folder / CONFIG).read_bytes()))["vocab_size"], str(tokenizer))
    write_companion_files(files, folder)


def _tokenizer_file(file: Path) -> dict[str, bytes]:
    """Returns the content of tokenizer files by name, for a file with the content of a tokenizer.json.

    If the file is named tokenizer.json, the other tokenizer files of its folder are included."""
    content = read_json(file)
    if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
        raise CheckpointError(f"{file}: is not a tokenizer.json; pass a tokenizer.json, or the folder of a tokenizer")
    if file.name == "tokenizer.json":
        return read_companion_files(file.parent)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": file.read_bytes(), "tokenizer_config.json": _json(config)}


def _from_transformers(name: str, key: str = "") -> dict[str, bytes]:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        try:
            AutoTokenizer.from_pretrained(name, trust_remote_code=False).save_pretrained(folder)
        except (OSError, ValueError) as problem:
            reason = str(problem).strip().splitlines()[0]
            raise CheckpointError(f"{key}{name} cannot be loaded as a HuggingFace tokenizer ({reason})") from problem
        return read_companion_files(folder)


def _built(files: Mapping[str, bytes], args: NeoXArgs) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_companion_files(files, Path(folder))
        try:
            return make_tokenizer("HFTokenizer", folder, eod_token=args.eod_token)
        except TokenizerError as problem:
            raise CheckpointError(
                f"tokenizer: {problem}; or leave the tokenizer out with --no_save_tokenizer"
            ) from problem


def _tokenizer_config(tokenizer: Tokenizer) -> bytes:
    special, ids = tokenizer.special_tokens, {role: getattr(tokenizer, role) for role in _ROLES}
    names = {f"{role}_token": special[token_id] for role, token_id in ids.items() if token_id in special}
    return _json({"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _with_pad(files: dict[str, bytes], pad: int) -> dict[str, bytes]:
    """Returns `files` with the token of id `pad` as pad_token in tokenizer_config.json.

    Without tokenizer.json it returns `files` unchanged. Raises CheckpointError if tokenizer.json has no such
    id."""
    if "tokenizer.json" not in files:
        return files
    tokenizer_json = parse_json(files["tokenizer.json"])
    names = {token["id"]: token["content"] for token in tokenizer_json.get("added_tokens", [])}
    vocab = tokenizer_json.get("model", {}).get("vocab", {})
    names = {**({i: name for name, i in vocab.items()} if isinstance(vocab, dict) else {}), **names}
    if pad not in names:
        raise CheckpointError(f"--pad-token-id: {pad}: the tokenizer has no token with this id")
    config = {**parse_json(files["tokenizer_config.json"]), "pad_token": names[pad]}
    return {**files, "tokenizer_config.json": _json(config)}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
