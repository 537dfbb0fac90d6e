"""Configurations broken at random: each ends in the loader's list of problems with its file and line."""

import json
import random
import re

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.keys.declaration import Key, keys_of, literal_values, union_members
from tests.neox_arguments.conftest import ELEUTHER

DERIVED_KEYS = {"batch_size", "lr", "optimizer_type", "dynamic_loss_scale", "is_pipe_parallel", "attention_config"}
KEYS = keys_of(NeoXArgs)


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
        heads, more_layers = values["num_attention_heads"], values["num_layers"] + 1
        contradictions = {
            "hidden_size": heads * 64 + 1, "seq_length": values["max_position_embeddings"] + 1,
            "num_kv_heads": heads + 1, "min_lr": 3.0, "attention_config": f"[[[flash], {more_layers}]]", "lr": 0.125,
            "batch_size": 977, "zero_stage": 3, "checkpoint_factor": 2.5, "pipe_parallel_size": more_layers,
            "model_parallel_size": heads * 2 + 1, "split": '"90, ten, 1"', "warmup_iters": "10\nwarmup: 0.5",
            "train_epochs": 2,
        }  # fmt: skip
        name = chance.choice(list(contradictions))
        lines.pop("warmup", None)
        lines[name] = f"{name}: {contradictions[name]}"
    return "\n".join(lines.values()) + "\n", kind, name


def cases():
    chance = random.Random(4)
    sources = [
        {key: value for key, value in entry["values"].items() if key not in DERIVED_KEYS}
        for name, entry in sorted(ELEUTHER["loaded"].items())
        if "train_iters" in entry["values"] and "mamba" not in name and "gmlp" not in name and "rwkv" not in name
    ]
    return [corrupt(chance.choice(sources), chance) for _ in range(200)]


def test_every_broken_file_is_refused_with_its_file_and_line(write):
    kinds = set()
    for text, kind, name in cases():
        with pytest.raises(ConfigError) as refused:
            load(write(broken=text))
        rows = enumerate(text.replace("-", "_").splitlines(), 1)
        places = tuple(f"broken.yml:{number}: " for number, line in rows if line.startswith(f"{name}:"))
        messages = [problem.replace("-", "_") for problem in refused.value.problems if problem.startswith(places)]
        assert re.search(rf"\b{name}\b", "\n".join(messages)), f"{kind} {name} {places}: {refused.value}"
        kinds.add(kind)
    assert len(kinds) == 5


def test_the_files_they_are_made_from_load(write):
    """The source files are valid, so a refusal is caused by the fault alone."""
    for name, entry in ELEUTHER["loaded"].items():
        if "gmlp" in name or "mamba" in name:
            continue
        values = {key: value for key, value in entry["values"].items() if key not in DERIVED_KEYS}
        load(write(whole="".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items())))
