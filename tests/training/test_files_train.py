"""Files of GPT-NeoX and of its fork train, not only load: each shrunken by overrides, with at most one added line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch import process_info
from megatron.neox_arguments import ConfigError, load
from megatron.training import start
from megatron.training.loop import batches_of
from tests.pool import run_ranks
from tests.training.fork_files import FORK_FILES
from tests.training.runs import BASE, GOLDEN

FILE = json.loads((GOLDEN / "configs/configs_eleuther.json").read_text())["loaded"]
SHRINK: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": None,
    "seq_length": 128,
    "precision": "fp32",
    "fp16": None,
    "bf16": None,
    "train_iters": 3,
    "model_parallel_size": 1,
    "pipe_parallel_size": 0,
    "train_batch_size": None,  # GPT-NeoX made it for eight ranks
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": None,
    **{key: None for key in ("save", "load", "log_dir", "tensorboard_dir", "sample_input_file")},
    **{f"{name}_data_{what}": None for name in ("train", "valid", "test") for what in ("paths", "weights")},
    "merge_file": None,
    **{key: BASE[key] for key in ("data_path", "tokenizer_type", "vocab_file", "index_cache_dir", "num_workers")},
}
PROPOSED = re.compile(r"`((?:compat_ffn_width|te_backend): \w+)`")


def line_to_add(refused: ConfigError) -> str | None:
    """The line that a refusal proposes; bf16 that GPT-NeoX itself wrote into deepspeed_extra_args is taken out."""
    found = PROPOSED.search(str(refused))
    return found[1] if found else "deepspeed_extra_args: null" if "deepspeed_extra_args.bf16" in str(refused) else None


def shrunk(path: str) -> dict[str, Any]:
    """Overrides: SHRINK; the file's attention_config for two layers, its list cut off or its first pattern for all;
    its own width of the MLP, if it has one, no longer that of 70B."""
    values = yaml.safe_load(Path(path).read_text())
    kinds = values.get("attention_config")
    two = kinds if kinds is None else kinds[:2] if isinstance(kinds[0], str) else [[kinds[0][0], "all"]]
    return {**SHRINK, "attention_config": two} | ({"intermediate_size": 256} if values.get("intermediate_size") else {})


def attempt(path: str, lines: list[str]) -> list[float]:
    """Losses of three steps."""
    added = {line.split(": ")[0]: yaml.safe_load(line.split(": ")[1]) for line in lines}
    training = start(load([path], shrunk(path) | added), process_info())
    batches = batches_of(training)
    losses = [float(training.engine.train_step(next(batches), training.schedule(step)).loss) for step in range(3)]
    training.engine.close()
    return losses


def train_three_steps(rank: int, world: int, paths: list[str]) -> list[tuple[str, str]]:
    """For the pool: (standing, detail) of each file."""
    found = []
    done: dict[str, tuple[str, str]] = {}  # files that differ only in what the overrides say
    for path in paths:
        effective = json.dumps(yaml.safe_load(Path(path).read_text()) | shrunk(path), sort_keys=True)
        if effective in done:
            found.append(done[effective])
            continue
        lines: list[str] = []
        while True:
            try:
                losses = attempt(path, lines)
                standing = "trained as it is" if not lines else f"trained with `{lines[0].split(': ')[0]}`"
                found.append((standing, " ".join(f"{loss:.3f}" for loss in losses)))
                done[effective] = found[-1]
                break
            except ConfigError as refused:
                line = line_to_add(refused)
                if lines or line is None:
                    later = all("is not built yet" in problem for problem in refused.problems)
                    found.append(("later" if later else "refused", str(refused)))
                    break
                lines.append(line)
    return found


def written(folder: Path, name: str, values: dict[str, Any]) -> str:
    path = folder / f"{name.replace('/', '_').replace(' ', '')}.yml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return str(path)


@pytest.mark.timeout(240)
def test_every_golden_file_trains_or_needs_what_is_not_here(tmp_path, capsys):
    names = sorted(FILE)
    paths = [written(tmp_path, name, FILE[name]["values"]) for name in names]
    results = dict(zip(names, run_ranks(train_three_steps, 1, paths, timeout=230)[0], strict=True))
    counts: dict[str, int] = {}
    for standing, _ in results.values():
        counts[standing] = counts.get(standing, 0) + 1
    with capsys.disabled():
        print(f"\ngolden files: {counts}")
    for name, (standing, detail) in results.items():
        needs = "mamba" in name or "dmoe" in name
        refused = any(part in name for part in ("rwkv", "gmlp", "sparse", "tests/config/test_setup.yml"))
        refused = refused or ("bnb" in name and "needs bitsandbytes: pip install" in detail)
        expected = "later" if needs else "refused" if refused else "trained"
        assert standing.startswith(expected), (name, standing, detail)


@pytest.mark.parametrize("expected", ["trained", "later"])
def test_files_like_those_of_the_fork_train(tmp_path, capsys, expected):
    chosen = {name: text for name, (text, standing) in FORK_FILES.items() if standing == expected}
    paths = []
    for name, text in chosen.items():
        paths.append(str(tmp_path / f"{name}.yml"))
        Path(paths[-1]).write_text(text)
    results = dict(zip(chosen, run_ranks(train_three_steps, 1, paths, timeout=230)[0], strict=True))
    with capsys.disabled():
        print(f"\nfiles like the fork's: {[standing for standing, _ in results.values()]}")
    for name, (standing, detail) in results.items():
        assert standing.startswith(expected), (name, standing, detail)
