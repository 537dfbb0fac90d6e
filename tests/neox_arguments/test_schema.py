"""The JSON Schema of configuration files, under a validator we did not write."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
import yaml

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.reading.files import ConfigLoader
from tests.neox_arguments.conftest import ELEUTHER, ROOT
from tests.neox_arguments.test_corrupted import misspell, wrong_value

NO_CONFIG = ("pipeline.yml", "promotion_gates.yml")
PRESETS = sorted(path for path in (ROOT / "configs").rglob("*.yml") if path.name not in NO_CONFIG)
MISTAKES = 50


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = json.loads((ROOT / "docs/configuration.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def read(path: Path) -> dict:
    return yaml.load(path.read_text(), Loader=ConfigLoader) or {}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_presets_are_valid(validator, path):
    assert [error.message for error in validator.iter_errors(read(path))] == []


def test_golden_files_are_valid_in_both_spellings(validator):
    """GPT-NeoX's values of its files are valid, but for the one file that has text for a number."""
    for name, entry in ELEUTHER["loaded"].items():
        dashes = {key.replace("_", "-"): value for key, value in entry["values"].items()}
        for values in (entry["values"], dashes):
            assert validator.is_valid(values) == ("gmlp" not in name), name


def test_seeded_mistakes_are_flagged(validator):
    chance, keys, flagged = random.Random(50), keys_of(NeoXArgs), 0
    files = [read(path) for path in PRESETS if len(read(path)) > 10]
    for _ in range(MISTAKES):
        values = dict(chance.choice(files))
        kind = chance.choice(["misspelt", "type", "bound", "section"])
        if kind == "misspelt":
            name = chance.choice([key for key in values if len(key) > 3])
            values[misspell(name, chance)] = values.pop(name)
        elif kind == "type":
            name = chance.choice(list(values))
            values[name] = wrong_value(keys[name.replace("-", "_")])
        elif kind == "bound":
            bounded = [key for key in values if keys[key].ge is not None or keys[key].gt is not None]
            values[chance.choice(bounded)] = -3
        else:
            values["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "epsilon": 1e-8}}
        flagged += not validator.is_valid(values)
    assert flagged == MISTAKES


def test_what_files_may_say_is_valid(validator):
    for values in (
        {"train_iters": "${EPOCHS:-3}", "optimizer": {"params": {"lr": "${LR}"}}, "data-path": "${DATA_DIR:-/x}/y"},
        {"activation": "GELU", "optimizer": {"type": "adam", "params": {}}},
        {"fp16": None, "num_gpus": None},
        {"attention_config": [[["flash"], 12]], "checkpoint_factor": 1.5},
    ):
        assert validator.is_valid(values), values
    for values in ({"train_iters": "three"}, {"train_iters": 2.5}, {"activation": "gello"}, {"fp16": 1}):
        assert not validator.is_valid(values), values


def test_a_key_says_in_an_editor_what_it_means(validator):
    properties = validator.schema["properties"]
    assert "Largest norm of the whole gradient" in properties["gradient_clipping"]["description"]
    assert properties["use_mup"]["deprecated"] and "deprecated" not in properties["seed"]
    assert properties["seed"]["default"] == 1234
