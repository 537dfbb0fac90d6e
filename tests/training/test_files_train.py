"""Configuration files as people wrote them train, not only load: GPT-NeoX's and its geodesic fork's."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch import process_info
from megatron.neox_arguments import ConfigError, load
from megatron.training import start
from tests.pool import run_ranks
from tests.training.runs import BASE, GOLDEN, TABLE, cells, metric_rows, take_steps

_READ = json.loads((GOLDEN / "configs/configs_eleuther.json").read_text())["loaded"]
UPSTREAM: dict[str, dict[str, Any]] = {}
"""By name; of a file that loads only beside another, the two together."""
for _name in sorted(_READ):  # the plain file sorts before itself with others
    # What GPT-NeoX itself hands to DeepSpeed under another name is no line of the file.
    _keys = {key: value for key, value in _READ[_name]["values"].items() if key != "deepspeed_extra_args"}
    UPSTREAM.setdefault(_name.partition(" + ")[0].removeprefix("configs/").removesuffix(".yml"), _keys)
FORK: dict[str, dict[str, Any]] = json.loads((GOLDEN / "configs/fork_files.json").read_text())

NOT_HERE = {"rwkv/170M": "RWKV", "sparse": "sparse attention", "tests/config/test_setup": "sm3"}
NOT_HERE["gmlp_small"] = "1.0e_8"  # and gMLP
"""Files that need what is not here, and what is named."""
WIDTHS = {
    **{f"llama/{size}": "upstream" for size in ("7B", "13B", "30B", "65B")},
    **{f"llama2/{size}": "upstream" for size in ("7B", "13B", "70B")},
    **{f"llama2/codellama_{size}": "none" for size in ("7B", "34B")},
}
"""Files whose MLP has several readings, and the value of compat_ffn_width that the refusal proposes."""
_PATHS = ("save", "load", "log_dir", "tensorboard_dir", "sample_input_file", "sample_output_file", "hostfile")
_SETS = tuple(f"{part}_data_{kind}" for part in ("train", "valid", "test") for kind in ("paths", "weights"))
_DATA = ("merge_file", "eval_tasks", *_SETS)


def small(values: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides that make a file small enough to train; all else, precision and te_* too, is the file's."""
    kinds, kv = values.get("attention_config"), values.get("num_kv_heads")
    if kinds is not None:
        kinds = kinds[:2] if isinstance(kinds[0], str) else [[kinds[0][0], 2]]
    heads = {"attention_config": kinds, "num_kv_heads": kv and (4 if kv == values["num_attention_heads"] else 2)}
    width = values.get("intermediate_size") and 248  # one reading where the file has one
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": width, "seq_length": 64}
    steps = min(values.get("gradient_accumulation_steps") or 1, 2)
    micro = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps}
    # GPT-NeoX made it for eight ranks.
    unset = dict.fromkeys(("num_gpus", "global_num_gpus", "train_batch_size", "batch_size", *_PATHS, *_DATA))
    run = {"train_iters": 3, "lr_decay_iters": 3, "eval_iters": min(values.get("eval_iters", 100), 1)}
    launch = {"launcher": "pdsh", "deepspeed_slurm": False, "model_parallel_size": 1}
    launch["pipe_parallel_size"] = min(values.get("pipe_parallel_size", 0), 1)
    data = {key: BASE[key] for key in ("data_path", "tokenizer_type", "vocab_file", "index_cache_dir", "num_workers")}
    other_corpus = str(GOLDEN / "dataset" / "corpusB_text_document")
    unlearning = {key: other_corpus for key in ("ga_dataset", "gd_retain_dataset") if values.get(key)}
    return {**sizes, **heads, **micro, **run, **launch, **unset, **data, **unlearning}


def written(folder: Path, name: str, values: Mapping[str, Any]) -> Path:
    path = folder / f"{name.replace('/', '_')}.yml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False))
    return path


_NUMBERS = (
    "lr", "min_lr", "warmup", "weight_decay", "betas", "eps", "init_method_std", "gd_retain_weight",
    "checkpoint_factor", "eval_interval", "log_interval", "steps_per_print", "keep_last_n_checkpoints",
    "ga_interleave_ratio", "reduce_bucket_size", "allgather_bucket_size", "make_vocab_size_divisible_by",
    "max_position_embeddings",
)  # fmt: skip
"""Keys that no code branches on."""


def kinds_of(files: Mapping[str, Mapping[str, Any]], ignored_keys: Sequence[str] = _NUMBERS) -> list[str]:
    """Files that differ in more than overrides, names of runs and `ignored_keys` (rates, intervals)."""
    first_names: dict[str, str] = {}
    for name, values in files.items():
        first_names.setdefault(
            json.dumps(_compared_keys({**values, **small(values)}, ignored_keys), sort_keys=True), name
        )
    return list(first_names.values())


def _compared_keys(values: Any, ignored_keys: Sequence[str]) -> Any:
    if not isinstance(values, Mapping):
        return values
    compared = {
        key: _compared_keys(value, ignored_keys)
        for key, value in values.items()
        if value is not None and key not in ignored_keys
    }
    return {key: value for key, value in compared.items() if not key.startswith("wandb_")}


def line_needed(path: Path) -> dict[str, Any]:
    """The line that a refusal of the file as it is proposes; none for most."""
    width = [reason for reason in load([path]).refusals().values() if "`compat_ffn_width: " in reason]
    return {"compat_ffn_width": width[0].split("`compat_ffn_width: ")[1].split("`")[0]} if width else {}


ROOT = Path(__file__).resolve().parents[2]
FILES = {**UPSTREAM, **FORK}
TRAINED = {name: values for name, values in FILES.items() if name not in NOT_HERE}
KINDS = kinds_of(TRAINED)
SAME_KIND = [name for name in kinds_of(TRAINED, ignored_keys=()) if name not in KINDS]
TOLERANCE = {"fp32": 1e-5, "bfloat16": 0.02, "fp16": 5e-3}
"""Relative bounds of losses between layouts: sums in another order, rounded to activations' precision."""


def some_steps(rank: int, world: int, runs: list[tuple[str, dict[str, Any]]]) -> list[str | list[float]]:
    """For the pool: losses of the steps of each file, or why it was refused."""
    results: list[str | list[float]] = []
    for path, overrides in runs:
        try:
            training = start(load([path], overrides).check_training(), process_info())
        except ConfigError as refused:
            results.append(str(refused))
            continue
        results.append(take_steps(training, training.args.train_iters).losses)
        training.engine.close()
    return results


def test_files_that_are_alike_are_tried_once() -> None:
    assert len(UPSTREAM) == 53 and len(FORK) == 54 and len(TRAINED) == 49 + 54 and 30 < len(KINDS) < 70


@pytest.mark.parametrize("name", sorted(TRAINED))
def test_a_file_needs_no_line_but_for_a_width_with_several_readings(name: str, tmp_path: Path) -> None:
    assert line_needed(written(tmp_path, name, FILES[name])).get("compat_ffn_width") == WIDTHS.get(name)


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_what_is_not_here_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load([written(tmp_path, name, FILES[name])], {"train_batch_size": 8}).check_training()
    assert any(NOT_HERE[name] in line for line in refused.value.problems), refused.value.problems


def runs_of(folder: Path, names: Iterable[str], **overrides: Any) -> list[tuple[str, dict[str, Any]]]:
    """Each file as it is written, and overrides that make it small."""
    paths = {name: written(folder, name, FILES[name]) for name in names}
    return [(str(path), {**small(FILES[name]), **line_needed(path), **overrides}) for name, path in paths.items()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names", cells([KINDS[::3]], product=[KINDS, SAME_KIND]), ids=["some", "kinds", "other numbers"]
)
def test_every_file_trains_as_it_is_written(names: list[str], tmp_path: Path) -> None:
    results = run_ranks(some_steps, 1, runs_of(tmp_path, names), timeout=590)[0]
    for name, losses in zip(names, results, strict=True):
        assert not isinstance(losses, str) and all(0 < loss < 20 for loss in losses[:2]), (name, losses)
        assert abs(losses[2]) < 20 * FILES[name].get("gd_retain_weight", 1), (name, losses)  # it may unlearn


LAYOUTS = [TABLE[name] for name in ("plain", "tp2", "pp2")]
UNLEARNING = kinds_of({name: FORK[name] for name in sorted(FORK) if "ga_dataset" in FORK[name]})
# Four steps that alternate, of which the third is one on the forget set.
ALTERNATING = {"train_iters": 4, "ga_interleave_ratio": 1}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("names", "more_overrides"), cells(
    [], product=[(KINDS[1::6], {}), (KINDS, {}), (UNLEARNING, ALTERNATING)],
), ids=["some", "kinds", "unlearning"])  # fmt: skip
def test_files_in_layouts(names: list[str], more_overrides: dict[str, Any], tmp_path: Path) -> None:
    """Losses of one process, of which every other run has those in tp2, and the rest in pp2."""
    runs = runs_of(tmp_path, names, **more_overrides)
    one_process = run_ranks(some_steps, 1, runs, timeout=880)[0]
    for i, (ranks, keys) in enumerate(LAYOUTS[1:]):
        actual = run_ranks(
            some_steps, ranks, [(path, {**run_overrides, **keys}) for path, run_overrides in runs[i::2]], timeout=880
        )[0]
        for (path, overrides), expected, losses in zip(runs[i::2], one_process[i::2], actual, strict=True):
            assert losses == pytest.approx(expected, rel=TOLERANCE[load([path], overrides).precision]), (keys, path)
    for (path, _), losses in zip(runs, one_process, strict=True):
        if more_overrides is ALTERNATING:
            assert losses[2] > 100 if "gdiff" in path else losses[2] < 0, (path, losses)
            assert all(0 < losses[step] < 20 for step in (0, 1, 3)), (path, losses)


@pytest.mark.timeout(600)
@pytest.mark.product
@pytest.mark.parametrize("name", KINDS)
def test_typed_as_a_command(name: str, tmp_path: Path) -> None:
    """In one of the layouts, by turns, with the losses that the file has alone."""
    ((path, overrides),) = runs_of(tmp_path, [name])
    ranks, keys = LAYOUTS[KINDS.index(name) % 3]
    places = {"save": str(tmp_path), "tensorboard_dir": f"{tmp_path}/tb", "log_dir": f"{tmp_path}/logs"}
    places |= {"num_gpus": ranks, "log_interval": 1}  # for the losses to be read
    if not FILES[name].get("checkpoint_factor") and not FILES[name].get("extra_save_iters"):
        places["checkpoint_factor"] = 3  # GPT-NeoX asks for it beside save
    words = [f"{key}={json.dumps(value)}" for key, value in (overrides | places | keys).items()]
    command = [sys.executable, str(ROOT / "deepy.py"), "train.py", path, "--set", *words]
    env = {**os.environ, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0 and "run finished at iteration 3" in done.stdout, done.stderr[-3000:]
    losses = [row["train/lm_loss"] for row in metric_rows(tmp_path)]
    expected = run_ranks(some_steps, 1, [(path, overrides)])[0][0]
    assert losses == pytest.approx(expected, rel=TOLERANCE[load([path], overrides).precision])
