"""The companion files of a HuggingFace model: tokenizer, chat templates, processors of images and sound,
generation defaults, terms of use.

An imported model keeps them in `huggingface/` of its checkpoints, and training copies them into every later
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
from megatron.checkpointing.families import check_fields, text_config
from megatron.checkpointing.huggingface.folder import LEGAL, TEMPLATES
from megatron.checkpointing.huggingface.model_files import CONFIG, read_config, read_json
from megatron.checkpointing.tensor_files import FileRecord, write_bytes
from megatron.data.files import sync
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer import Tokenizer, TokenizerError, build_tokenizer, make_tokenizer

HF_SUBFOLDER = "huggingface"
GENERATION, CARD = "generation_config.json", "README.md"
CHAT_TEMPLATE = "chat_template.jinja"
# As transformers and Mistral name them; further templates have a folder of their own.
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", CHAT_TEMPLATE, "chat_template.json", f"{TEMPLATES}/*.jinja",
    "tokenizer.*.json", "tokenizer.model.v*", "tekken.json", "tiktoken.model", "*.tiktoken", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
# Of what becomes tokens beside text, and Mistral's words to the model.
_PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", "*SYSTEM_PROMPT.txt",
)  # fmt: skip
_OBJECTS = (CONFIG, GENERATION, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # and small
_ROLES = ("bos", "eos", "pad")


@dataclass(frozen=True)
class CompanionFiles:
    """Everything but weights that an export writes.

    files: content of each file to be written, by name. ids: `bos_token_id` and so on for config.json.
    vocab_size: rows of the embedding before it was padded; None where that is not known. tokens: number of
    tokens of the tokenizer; None without one. config, card: config.json and README.md of the model that was
    imported, empty without one. whole: as config; of a multimodal model all of it, config is that of its
    language model.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    tokens: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    card: str = ""
    whole: Mapping[str, Any] = field(default_factory=dict)


def read_companion_files(folder: str | Path, tokenizer: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """The companion files that a checkpoint keeps of a HuggingFace folder, by name.

    tokenizer: the files of the tokenizer that a run uses; where it is not the folder's, the folder's
    tokenizer files are left out. Raises CheckpointError for a file of another kind than its name says.
    """
    path = Path(folder)
    patterns = (CONFIG, GENERATION, CARD, *_TOKENIZER, *_PROCESSORS, *LEGAL)
    found = dict.fromkeys(file for pattern in patterns for file in sorted(path.glob(pattern)) if file.is_file())
    files = {file.relative_to(path).as_posix(): file.read_bytes() for file in found}
    for name in _OBJECTS:
        if name in files:
            content = read_config(path) if name == CONFIG else read_json(path / name)
            if name == GENERATION:
                check_fields(content, str(path / name))
    if tokenizer is not None and tokenizer.get("tokenizer.json") != files.get("tokenizer.json"):
        return {name: content for name, content in files.items() if not is_of_tokenizer(name)}
    return files


def is_of_tokenizer(name: str) -> bool:
    """Whether a companion file of this name belongs to the tokenizer; so do chat templates."""
    return any(fnmatchcase(name, pattern) for pattern in _TOKENIZER)


def write_companion_files(files: Mapping[str, bytes], folder: Path, prefix: str = "") -> list[FileRecord]:
    """Write files into `folder`, which is made if it is not there, each and their folders synced to disk.

    files: content by name; a name may have a folder. prefix: of the names in the records that are returned.
    Raises CheckpointError where they cannot be written.
    """
    records = []
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        records.append(write_bytes(content, folder / name, prefix + name))
    for place in {(folder / name).parent for name in files}:
        sync(place)
    return records


def check_tokens(files: Mapping[str, bytes], rows: int, where: str) -> None:
    """Raise CheckpointError where a tokenizer has tokens without a row of the embedding.

    files: companion files by name, of which tokenizer.json, else vocab.json and added_tokens.json, say the
    tokens. rows: of the embedding. where: the model, for the error.
    """
    for name in ("tokenizer.json", "vocab.json"):
        if name not in files:
            continue
        try:
            ids = _ids(json.loads(files[name]), json.loads(files.get("added_tokens.json", b"{}")))
            beyond = sorted((token_id, token) for token, token_id in ids.items() if token_id >= rows)
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise CheckpointError(f"{where}: {name} cannot be read ({type(problem).__name__}: {problem})") from problem
        if beyond:
            raise CheckpointError(
                f"{where}: {name} has {beyond[-1][0] + 1} tokens, the embedding {rows} rows (vocab_size): none for "
                f"{beyond[0][1]!r} (id {beyond[0][0]}); remove such tokens from a copy of the folder, or begin a run "
                "with it as `load`, which gives them rows of their own"
            )
        return


def _ids(content: Mapping[str, Any], added: Mapping[str, int]) -> dict[str, int]:
    """Ids by token. content: of tokenizer.json, or of vocab.json; added: of added_tokens.json."""
    if "model" not in content or isinstance(content["model"], int):  # vocab.json may have the word, too
        return {**content, **added}
    vocab = content["model"].get("vocab") or {}
    if not isinstance(vocab, dict):  # of a unigram model: [token, score] in the order of their ids
        vocab = {entry[0]: token_id for token_id, entry in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}


def exported_vocab_size(carried: Mapping[str, bytes], tokens: int) -> int | None:
    """The number of rows of vocabulary that an export of a checkpoint keeps; None: all.

    carried: the companion files of the checkpoint. tokens: number of tokens of its tokenizer.
    """
    rows = text_config(json.loads(carried.get(CONFIG, b"{}"))).get("vocab_size")
    return None if rows is None else max(rows, tokens)


def declared_eos_ids(carried: Mapping[str, bytes]) -> tuple[int, ...]:
    """The ids that end a text by a model's own files: `eos_token_id` of generation_config.json, else of
    config.json, as transformers reads them."""
    file = GENERATION if GENERATION in carried else CONFIG
    eos = text_config(json.loads(carried.get(file, b"{}"))).get("eos_token_id")
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
    """The companion files for an export of checkpoint `source`: those of the model that was imported, else
    made from the run's own tokenizer or `vocab_file`.

    tokenizer: false leaves its files out. vocab_is_hf: `vocab_file` is a folder or a name on the Hub. scores:
    the model is a reward model, whose score transformers reads at the last token that is no padding, so that
    the pad token is one that ends no text: another special token where the tokenizer's ends some.
    Raises CheckpointError for a tokenizer that cannot be had.
    """
    kept = read_companion_files(source / HF_SUBFOLDER)
    whole, card = json.loads(kept.pop(CONFIG, b"{}")), kept.pop(CARD, b"").decode(errors="replace")
    config = text_config(whole)
    files, ids, tokens = dict(kept), {}, None
    carried, built_tokenizer = any(map(is_of_tokenizer, files)), None
    if not carried and tokenizer:
        files |= _own_tokenizer(source, args, vocab_is_hf)
    if "tokenizer.json" in files and tokenizer:
        built_tokenizer = _built(files, args)
        tokens = built_tokenizer.vocab_size
        ids = {f"{role}_token_id": getattr(built_tokenizer, role) for role in _ROLES}
        if "tokenizer_config.json" not in files:
            files["tokenizer_config.json"] = _tokenizer_config(built_tokenizer)
    if not tokenizer:
        files = {name: content for name, content in files.items() if not is_of_tokenizer(name)}
    if carried or not ids:  # config.json may name several ends
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
    return CompanionFiles(files, ids, config.get("vocab_size"), tokens, config, card, whole)


def _pad_of_scores(source: Path, ids: Mapping[str, Any], tokenizer: Tokenizer | None, given: int | None) -> int:
    """The id that pads the texts of a reward model, and ends none. ids: those of config.json; given: by the
    user. Raises CheckpointError where there is none."""
    eos = ids.get("eos_token_id")
    ends, choices = {*(eos if isinstance(eos, list) else [eos])}, [ids.get("pad_token_id")]
    if tokenizer is not None:
        ends |= {tokenizer.eod, tokenizer.eos}
        choices += [i for i in tokenizer.special_tokens if i != tokenizer.bos] + [tokenizer.bos]
    pads = [i for i in (choices if given is None else [given]) if i is not None and i not in ends]
    if not pads:
        what = "no token is known to pad with" if given is None else f"--pad-token-id {given} ends texts"
        raise CheckpointError(
            f"{source}: {what}, and transformers reads the score of a reward model at the last token that is no "
            "padding; give the id of one that ends no text with --pad-token-id"
        )
    return pads[0]


def _own_tokenizer(source: Path, args: NeoXArgs, vocab_is_hf: bool) -> dict[str, bytes]:
    """Files of the run's tokenizer, as its checkpoint keeps them or from `vocab_file`, with what stands
    beside it."""
    place = Path(args.vocab_file) if args.vocab_file else None
    beside = {}
    if place is not None:
        beside = read_companion_files(place if place.is_dir() else place.parent)
        beside = {name: content for name, content in beside.items() if is_of_tokenizer(name) or name == GENERATION}
    kept = read_companion_files(source / "tokenizer")
    if kept:
        same = beside.get("tokenizer.json") == kept.get("tokenizer.json")
        return {**kept, **(beside if same else {})}
    if vocab_is_hf:
        return _from_transformers(str(args.vocab_file), "vocab_file: ")
    if place is None:
        return {}  # imported without one, or of a kind that transformers cannot read from a file
    if place.is_dir() and beside:
        return beside
    try:
        made = build_tokenizer(args).files()
    except TokenizerError as problem:
        text = f"the tokenizer cannot be had: {problem}; or leave it out with --no_save_tokenizer"
        raise CheckpointError(text) from problem
    known = {name: content for name, content in made.items() if is_of_tokenizer(name)}
    if "tokenizer.json" in known and place.name == "tokenizer.json":
        known = {**known, **beside}
    if "vocab.json" in known:
        known["tokenizer_config.json"] = _json({"tokenizer_class": "GPT2Tokenizer"})
    return known


def add_tokenizer(folder: Path, tokenizer: str) -> None:
    """Give a HuggingFace folder that has none a tokenizer: of another folder, of a tokenizer.json by whatever
    name, or of a name on the Hub. Raises CheckpointError, also where the model has no row for a token."""
    place = Path(tokenizer)
    if place.is_dir():
        files = read_companion_files(place)
    elif place.is_file():
        files = _tokenizer_file(place)
    else:
        files = _from_transformers(tokenizer)
    files = {name: content for name, content in files.items() if is_of_tokenizer(name)}
    if not files:
        raise CheckpointError(f"{tokenizer}: holds no tokenizer")
    check_tokens(files, text_config(json.loads((folder / CONFIG).read_bytes()))["vocab_size"], str(tokenizer))
    write_companion_files(files, folder)


def _tokenizer_file(file: Path) -> dict[str, bytes]:
    """A tokenizer.json by whatever name; what stands beside it belongs to it only under that name."""
    content = read_json(file)
    if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
        raise CheckpointError(f"{file}: is no tokenizer.json; name one, or the folder of the tokenizer")
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
            raise CheckpointError(f"{key}{name} is no HuggingFace tokenizer ({reason})") from problem
        return read_companion_files(folder)


def _built(files: Mapping[str, bytes], args: NeoXArgs) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_companion_files(files, Path(folder))
        try:
            return make_tokenizer("HFTokenizer", folder, eod_token=args.eod_token)
        except TokenizerError as problem:
            raise CheckpointError(f"tokenizer: {problem}; or leave it out with --no_save_tokenizer") from problem


def _tokenizer_config(tokenizer: Tokenizer) -> bytes:
    names = {}
    for role in _ROLES:
        token_id = getattr(tokenizer, role)
        if token_id is not None and token_id in tokenizer.special_tokens:
            names[f"{role}_token"] = tokenizer.special_tokens[token_id]
    return _json({"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _with_pad(files: dict[str, bytes], pad: int) -> dict[str, bytes]:
    """The files with the token of id `pad` as pad_token of the tokenizer. Raises CheckpointError for an
    unknown id."""
    if "tokenizer.json" not in files:
        return files
    tokenizer_json = json.loads(files["tokenizer.json"])
    names = {token["id"]: token["content"] for token in tokenizer_json.get("added_tokens", [])}
    vocab = tokenizer_json.get("model", {}).get("vocab", {})
    names = {**({i: name for name, i in vocab.items()} if isinstance(vocab, dict) else {}), **names}
    if pad not in names:
        raise CheckpointError(f"--pad-token-id: {pad}: the tokenizer has no such token")
    config = {**json.loads(files["tokenizer_config.json"]), "pad_token": names[pad]}
    return {**files, "tokenizer_config.json": _json(config)}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
