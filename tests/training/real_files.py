"""Configuration files as people wrote them, made small: of GPT-NeoX (resolved keys) and of its geodesic
fork."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.neox_arguments import load
from tests.training.runs import BASE, GOLDEN

_READ = json.loads((GOLDEN / "configs/configs_eleuther.json").read_text())["loaded"]
UPSTREAM: dict[str, dict[str, Any]] = {}
"""By name; of a file that loads only beside another, the two together."""
for _name in sorted(_READ):  # the plain file sorts before itself with others
    # What GPT-NeoX itself hands to DeepSpeed under another name is no line of the file.
    _keys = {key: value for key, value in _READ[_name]["values"].items() if key != "deepspeed_extra_args"}
    UPSTREAM.setdefault(_name.partition(" + ")[0].removeprefix("configs/").removesuffix(".yml"), _keys)
FORK: dict[str, dict[str, Any]] = json.loads((GOLDEN / "configs/fork_files.json").read_text())

NOT_HERE: dict[str, str] = {
    "rwkv/170M": "RWKV is not here",
    "gmlp_small": 'expected float, got "1.0e_8"',  # and gMLP
    "sparse": "DeepSpeed's sparse attention is gone",
    "tests/config/test_setup": '"sm3" is refused',
}
"""Files that need what is not here, with what is said."""
WIDTHS = {
    **{f"llama/{size}": "upstream" for size in ("7B", "13B", "30B", "65B")},
    **{f"llama2/{size}": "upstream" for size in ("7B", "13B", "70B")},
    **{f"llama2/codellama_{size}": "none" for size in ("7B", "34B")},
}
"""Files whose MLP has several readings, and the value of compat_ffn_width that the refusal proposes."""
_PATHS = ("save", "load", "log_dir", "tensorboard_dir", "sample_input_file", "sample_output_file", "hostfile")
_SETS = (f"{part}_data_{what}" for part in ("train", "valid", "test") for what in ("paths", "weights"))
_DATA = ("merge_file", "eval_tasks", *_SETS)


def small(values: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides that make a file small enough to train here: sizes, paths, data, iterations, batch, launcher
    and parallel sizes. All else, precision, te_* keys, distributed_backend and kinds of attention too, is the
    file's."""
    kinds, kv = values.get("attention_config"), values.get("num_kv_heads")
    if kinds is not None:
        kinds = kinds[:2] if isinstance(kinds[0], str) else [[kinds[0][0], 2]]
    sizes = {
        "num_layers": 2,
        "attention_config": kinds,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": kv and (4 if kv == values["num_attention_heads"] else 2),
        "intermediate_size": values.get("intermediate_size") and 248,  # one reading where the file has one
        "seq_length": 64,
        "num_gpus": None,
        "global_num_gpus": None,
    }
    batch = {
        "train_batch_size": None,  # GPT-NeoX made it for eight ranks
        "batch_size": None,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": min(values.get("gradient_accumulation_steps") or 1, 2),
    }
    run = {
        "train_iters": 3,
        "lr_decay_iters": 3,
        "eval_iters": min(values.get("eval_iters", 100), 1),
        "launcher": "pdsh",
        "deepspeed_slurm": False,
        "model_parallel_size": 1,
        "pipe_parallel_size": min(values.get("pipe_parallel_size", 0), 1),
    }
    data = {key: BASE[key] for key in ("data_path", "tokenizer_type", "vocab_file", "index_cache_dir", "num_workers")}
    other = str(GOLDEN / "dataset" / "corpusB_text_document")
    unlearning = {key: other for key in ("ga_dataset", "gd_retain_dataset") if values.get(key)}
    return {**sizes, **batch, **run, **dict.fromkeys((*_PATHS, *_DATA)), **data, **unlearning}


def written(folder: Path, name: str, values: Mapping[str, Any]) -> Path:
    """The file, as YAML."""
    path = folder / f"{name.replace('/', '_')}.yml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False))
    return path


# Numbers that no code branches on.
_RATES = ("lr", "min_lr", "warmup", "weight_decay", "betas", "eps", "init_method_std", "gd_retain_weight")
_EVERY = (
    "checkpoint_factor", "eval_interval", "log_interval", "steps_per_print", "keep_last_n_checkpoints",
    "ga_interleave_ratio",
)  # fmt: skip
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "make_vocab_size_divisible_by", "max_position_embeddings")


def distinct(files: Mapping[str, Mapping[str, Any]], but: Sequence[str] = ()) -> Iterator[tuple[str, list[str]]]:
    """Names of files that differ in more than the overrides, names of runs and keys of `but`, each with its
    like."""
    alike: dict[str, list[str]] = {}
    for name, values in files.items():
        alike.setdefault(json.dumps(_told_apart({**values, **small(values)}, but), sort_keys=True), []).append(name)
    yield from ((names[0], names) for names in alike.values())


def kinds_of(files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """As `distinct`, of files that differ in more than rates, intervals and sizes of buffers."""
    return distinct(files, (*_RATES, *_EVERY, *_BUCKETS))


def _told_apart(values: Any, but: Sequence[str]) -> Any:
    if not isinstance(values, Mapping):
        return values
    kept = {key: _told_apart(value, but) for key, value in values.items() if value is not None and key not in but}
    return {key: value for key, value in kept.items() if not key.startswith("wandb_")}


def line_needed(path: Path) -> dict[str, Any]:
    """The line that a refusal of the file as it is proposes; none for most."""
    width = [reason for reason in load([path]).refusals().values() if "`compat_ffn_width: " in reason]
    return {"compat_ffn_width": width[0].split("`compat_ffn_width: ")[1].split("`")[0]} if width else {}
