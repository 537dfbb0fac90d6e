"""Configurations broken at random: each ends in the loader's list of problems with its file and line."""

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.keys.declaration import Key, keys_of, literal_values, union_members

FILE = json.loads((Path(__file__).parents[1] / "data/golden/configs/configs_eleuther.json").read_text())
MADE = {"batch_size", "lr", "optimizer_type", "dynamic_loss_scale", "is_pipe_parallel", "attention_config"}
KEYS = keys_of(NeoXArgs)
COUNT = 200


def wrong_value(key: Key):
    """A value no member of the key's type takes, None when it takes anything."""
    members = union_members(key.type)
    if any(member is str and not literal_values(member) for member in members):
        return ["not", "text"] if not any(getattr(m, "__origin__", None) is tuple for m in members) else {"no": "text"}
    if any(getattr(member, "__origin__", None) is not None and not literal_values(member) for member in members):
        return 3.25 if key.section is None and "Mapping" not in str(key.type) else "text"
    return "seventeen"


def misspell(name: str, chance: random.Random) -> str:
    while True:
        i = chance.randrange(1, len(name))
        wrong = chance.choice([name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:], name[:i] + "q" + name[i:]])
        if wrong.replace("-", "_") not in KEYS:
            return wrong


def corrupt(values: dict, chance: random.Random) -> tuple[str, str, str]:
    """(text of a broken file, kind of fault, key the message must name)."""
    kind = chance.choice(["misspelt", "type", "contradiction", "duplicate", "bound"])
    lines = {key: f"{key}: {json.dumps(value)}" for key, value in values.items()}
    if kind == "misspelt":
        key = chance.choice([k for k in lines if len(k) > 3])
        wrong = misspell(key, chance)
        lines[key] = lines[key].replace(key, wrong, 1)
        name = wrong.replace("-", "_")
    elif kind == "type":
        name = chance.choice([k for k in lines if k != "deepspeed_extra_args"])
        lines[name] = f"{name}: {json.dumps(wrong_value(KEYS[name]))}"
    elif kind == "duplicate":
        name = chance.choice([k for k in lines if "_" in k])
        lines[name] += "\n" + lines[name].replace(name, name.replace("_", "-"), 1)
    elif kind == "bound":
        name = chance.choice([k for k in lines if KEYS[k].ge is not None or KEYS[k].gt is not None])
        lines[name] = f"{name}: -3"
    else:
        heads = values["num_attention_heads"]
        name, line = chance.choice(
            [
                ("hidden_size", f"hidden_size: {heads * 64 + 1}"),
                ("seq_length", f"seq_length: {values['max_position_embeddings'] + 1}"),
                ("num_kv_heads", f"num_kv_heads: {heads + 1}"),
                ("min_lr", "min_lr: 3.0"),
                ("attention_config", f"attention_config: [[[flash], {values['num_layers'] + 1}]]"),
                ("lr", "lr: 0.125"),
                ("batch_size", "batch_size: 977"),
                ("zero_stage", "zero_stage: 3"),
                ("checkpoint_factor", "checkpoint_factor: 2.5"),
                ("pipe_parallel_size", f"pipe_parallel_size: {values['num_layers'] + 1}"),
                ("model_parallel_size", f"model_parallel_size: {heads * 2 + 1}"),
                ("split", 'split: "90, ten, 1"'),
                ("warmup_iters", "warmup_iters: 10\nwarmup: 0.5"),
                ("train_epochs", "train_epochs: 2"),
            ]
        )
        lines.pop("warmup", None)
        lines[name] = line
    return "\n".join(lines.values()) + "\n", kind, name


def cases():
    chance = random.Random(4)
    sources = [
        {key: value for key, value in entry["values"].items() if key not in MADE}
        for name, entry in sorted(FILE["loaded"].items())
        if "train_iters" in entry["values"] and "mamba" not in name and "gmlp" not in name and "rwkv" not in name
    ]
    return [corrupt(chance.choice(sources), chance) for _ in range(COUNT)]


def test_every_broken_file_is_refused_with_its_file_and_line(write, capsys):
    refused_counts: dict[str, int] = {}
    for text, kind, name in cases():
        files = write(broken=text)
        try:
            load(files)
        except ConfigError as refused:
            message = "\n".join(refused.problems)
            named = [problem for problem in refused.problems if re.search(rf"\b{name}\b", problem.replace("-", "_"))]
            assert named, f"{kind} {name}: {message}"
            lines = [
                number
                for number, line in enumerate(text.splitlines(), 1)
                if line.replace("-", "_").startswith(f"{name}:")
            ]
            places = [f"broken.yml:{number}: " for number in lines]
            assert any(problem.startswith(tuple(places)) for problem in named), f"{kind} {name} {places}: {message}"
            refused_counts[kind] = refused_counts.get(kind, 0) + 1
        else:
            pytest.fail(f"accepted: {kind} {name}: {yaml.safe_load(text).get(name)}")
    assert sum(refused_counts.values()) == COUNT and len(refused_counts) == 5
    with capsys.disabled():
        print(f"\nbroken configurations, all refused with file and line: {refused_counts}")


def test_the_files_they_are_made_from_load(write):
    """So that a refusal is of the fault and nothing else."""
    for name, entry in FILE["loaded"].items():
        if "gmlp" in name or "mamba" in name:
            continue
        values = {key: value for key, value in entry["values"].items() if key not in MADE}
        load(write(whole="".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())))
