"""The table of losses and the functions that it names agree; a new loss is one file and one entry."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.losses import TRAIN_IMPLS
from megatron.neox_arguments.values.losses import needs_reference, needs_step_baselines, scores_reference
from megatron.objectives import build_objective, kto, language_modelling, loss_function, pair_losses  # noqa: F401
from megatron.objectives.build import OBJECTIVES
from megatron.objectives.dpo import MATCHINGS
from tests.training.runs import config

ROOT = Path(__file__).resolve().parents[2]
LOSSES = [(impl, name) for impl, about in TRAIN_IMPLS.items() for name in about.losses]


@pytest.mark.parametrize(("impl", "name"), LOSSES)
def test_each_entry_has_its_function_and_its_keys(impl: str, name: str) -> None:
    about = TRAIN_IMPLS[impl]
    assert callable(loss_function(impl, name))
    assert {about.key, *about.options, *about.losses[name].options} <= keys_of(NeoXArgs).keys()
    assert name in keys_of(NeoXArgs)[about.key].choices


def test_each_function_has_its_entry() -> None:
    named = {loss.function for loss in TRAIN_IMPLS["dpo"].losses.values()}
    for name, function in inspect.getmembers(pair_losses, inspect.isfunction):
        if name in vars(pair_losses) and function.__module__ == pair_losses.__name__ and not name.startswith("_"):
            returns_losses = list(inspect.signature(function).parameters) == ["pairs", "s"]
            assert returns_losses == (f"pair_losses.{name}" in named), name


def test_what_is_built_is_what_the_table_has() -> None:
    assert OBJECTIVES.keys() == TRAIN_IMPLS.keys()
    assert MATCHINGS.keys() == {name for name, loss in TRAIN_IMPLS["dpo"].losses.items() if loss.needs_step_baselines}


PAIRS: dict[str, Any] = {
    "train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "unpacked", "data_path": None,
    "pos_train_data_paths": ["p"], "neg_train_data_paths": ["n"], "eod_mask_loss": False,
}  # fmt: skip
KTO: dict[str, Any] = {"train_impl": "kto", **{key: PAIRS[key] for key in list(PAIRS)[1:]}}


@pytest.mark.parametrize(
    ("keys", "reference", "scored", "meet"),
    [
        ({}, False, False, False),
        (PAIRS, True, True, False),
        (PAIRS | {"precompute_model_name": "ref"}, True, False, False),
        (PAIRS | {"dpo_reference_free": True}, False, False, False),
        (PAIRS | {"dpo_loss_type": ["simpo", "sft"]}, False, False, False),
        (PAIRS | {"dpo_loss_type": ["simpo", "aot"]}, True, True, True),
        (KTO, True, True, True),
        (KTO | {"precompute_model_name": "ref"}, True, True, True),
        (KTO | {"kto_loss_type": "apo_zero_unpaired"}, True, True, False),
        (KTO | {"compat_kto": True}, True, True, False),
    ],
)
def test_what_a_run_needs(keys: dict[str, Any], reference: bool, scored: bool, meet: bool) -> None:
    args = NeoXArgs.from_dict({**config(), **keys})
    assert (needs_reference(args), scores_reference(args), needs_step_baselines(args)) == (
        reference,
        scored,
        meet,
    )
    assert (build_objective(args).step_baselines is not None) == meet


FOCAL = '''"""Focal loss."""

from torch import Tensor


def focal(logprobs: Tensor) -> Tensor:
    """arXiv 1708.02002: tokens that are known count less."""
    return -(1 - logprobs.exp()) * logprobs
'''


RUN = """
from tests.training.runs import config, curves

print([part.losses for part in curves(0, 1, [config(sft_loss_type=name) for name in ("nll", "focal")], steps=2)])
"""


def test_a_loss_is_one_file_and_one_entry(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "megatron" / "objectives" / "focal.py").write_text(FOCAL)
    table = tmp_path / "megatron" / "neox_arguments" / "keys" / "losses.py"
    entry = '"dft": Loss("language_modelling.dft")'
    assert table.read_text().count(entry) == 1
    table.write_text(table.read_text().replace(entry, f'{entry}, "focal": Loss("focal.focal")'))
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, focal = json.loads(done.stdout.splitlines()[-1])
    assert len(focal) == 2 and all(0 < mine < plain_loss for mine, plain_loss in zip(focal, plain, strict=True))
