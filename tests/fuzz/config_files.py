"""Configuration files of runs and pipelines, and DeepSpeed's, with keys and values of all sorts."""

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.keys.declaration import Key, keys_of, literal_values, union_members
from megatron.neox_arguments.reading.yaml_loader import ConfigLoader
from megatron.neox_arguments.reports.config_dump import print_config
from megatron.pipelines.definition import read_pipeline
from tests.fuzz.campaign import Kind, command
from tests.fuzz.cases import FOLDER, MISSING, Case, Odd
from tests.fuzz.mutations import json_bytes, spoilt_bytes, spoilt_json, spoilt_value, values

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_NAMES = ("quickstart", "125M-dmoe", "125M", "20B", "llama_7b_gqa", "olmoe/1B-7B")
_CHECKS = ("check_generation", "check_evaluation", "check_serving", "check_planning")


@cache
def _settings(name: str) -> dict[str, Any]:
    config = yaml.load((CONFIGS / f"{name}.yml").read_text(), Loader=ConfigLoader)
    return {key.replace("-", "_"): value for key, value in config.items()}


@cache
def _sources() -> list[dict[str, Any]]:
    local = _settings("local_setup")
    names = [name for name in _NAMES if (CONFIGS / f"{name}.yml").is_file()]
    return [{**{k: v for k, v in local.items() if k not in _settings(name)}, **_settings(name)} for name in names]


@cache
def _keys() -> list[Key]:
    return list(keys_of(NeoXArgs).values())


@st.composite
def _plausible(draw: DrawFn, key: Key) -> Any:
    """A value of the key's type: in the bounds or out of them."""
    member = draw(st.sampled_from(union_members(key.type)))
    if choices := literal_values(member):
        return draw(st.sampled_from(choices))
    if member is bool:
        return draw(st.booleans())
    if member in (int, float):
        small = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 64, 100, 1000, 4096, 10**6, -1, 2**40]))
        return small if member is int else draw(st.sampled_from([small, 0.0, 0.5, 1e-5, 0.999, 1.0, 1e30, 5e-324]))
    return draw(values)


@st.composite
def _config(draw: DrawFn) -> Case:
    config = dict(draw(st.sampled_from(_sources())))
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from(_keys()))
        config[key.name] = draw(_plausible(key))
    damage = draw(st.sampled_from(["plausible", "value", "json", "bytes", "deepspeed"]))
    if damage == "bytes":
        lines = b"".join(f"{name}: ".encode() + json_bytes(value) + b"\n" for name, value in config.items())
        return {"a.yml": draw(spoilt_bytes(lines))}
    if damage == "deepspeed":
        names = ("optimizer", "fp16", "zero_optimization", "train_micro_batch_size_per_gpu", "gradient_clipping")
        extra = {name: config.pop(name) for name in names if name in config}
        return {"a.yml": json_bytes(config | {"deepspeed_config_file": "ds.json"}), "ds.json": draw(spoilt_json(extra))}
    content = {"plausible": json_bytes(config), "json": None}.get(damage, b"")
    content = content or draw(spoilt_json(config) if content is None else spoilt_value(config).map(json_bytes))
    name = draw(st.sampled_from(["a.yml", "a.json"]))
    return (
        {name: content}
        if draw(st.integers(0, 39))
        else {name: draw(st.sampled_from([FOLDER, MISSING, Odd("link", "itself")]))}
    )


def _run(folder: Path) -> None:
    if (folder / "pipeline.yml").exists():
        (folder / "configs").symlink_to(CONFIGS / "pipelines" / "quickstart" / "configs")
        read_pipeline(folder / "pipeline.yml")
        return
    name = "a.json" if (folder / "a.json").exists() else "a.yml"
    overrides = {"deepspeed_config_file": str(folder / "ds.json")} if (folder / "ds.json").exists() else {}
    file = folder / name
    if overrides:  # an override and the file would be the same key twice: the file names it without its folder
        file.write_bytes(file.read_bytes().replace(b'"ds.json"', json_bytes(overrides["deepspeed_config_file"])))
    args = load([file])
    command(lambda words: print(print_config(args)))
    assert NeoXArgs.from_json(args.to_json()) == args
    args.startup_notes()
    for check in _CHECKS:
        with suppress(ConfigError):  # what a run trains with does not suffice for each of these
            getattr(args, check)()
    args.check_training()
    args.for_world(args.pp * args.tp * args.context_parallel_size * 2)


@st.composite
def _pipeline(draw: DrawFn) -> Case:
    file = CONFIGS / "pipelines" / "quickstart" / "pipeline.yml"
    return {"pipeline.yml": draw(spoilt_json(yaml.safe_load(file.read_text())))}


KIND = Kind("config_files", st.one_of(_config(), _config(), _config(), _pipeline()), _run)
