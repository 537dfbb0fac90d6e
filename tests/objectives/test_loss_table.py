"""The table of losses and the functions that it names agree. A new loss: tests/guide/test_recipes.py."""

import inspect
from typing import Any

import pytest

from megatron.methods.preferences import pair_losses
from megatron.methods.preferences.objective import MATCHINGS
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.methods import declaration_of, train_impls
from megatron.neox_arguments.values.losses import needs_reference, scores_reference
from megatron.training.method import build_objective
from tests.training.runs import config

LOSSES = [(impl, name) for impl, entry in train_impls().items() for name in entry.losses]


@pytest.mark.parametrize(("impl", "name"), LOSSES)
def test_each_entry_has_its_function_and_its_keys(impl: str, name: str) -> None:
    entry = train_impls()[impl]
    assert callable(entry.losses[name].load_function())
    assert {entry.key, *entry.options, *entry.losses[name].options} <= keys_of(NeoXArgs).keys()
    assert name in keys_of(NeoXArgs)[entry.key].choices


def test_each_function_has_its_entry() -> None:
    function_names = {loss.function for loss in train_impls()["dpo"].losses.values()}
    for name, function in inspect.getmembers(pair_losses, inspect.isfunction):
        if name in vars(pair_losses) and function.__module__ == pair_losses.__name__ and not name.startswith("_"):
            returns_losses = list(inspect.signature(function).parameters) == ["pairs", "s"]
            assert returns_losses == (f"methods.preferences.pair_losses.{name}" in function_names), name


def test_what_is_built_is_what_the_table_has() -> None:
    assert MATCHINGS.keys() == {name for name, loss in train_impls()["dpo"].losses.items() if loss.needs_step_baselines}


PAIRS: dict[str, Any] = {"train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "unpacked", "data_path": None,
                         "pos_train_data_paths": ["p"], "neg_train_data_paths": ["n"],
                         "eod_mask_loss": False}  # fmt: skip
KTO: dict[str, Any] = {"train_impl": "kto", **{key: PAIRS[key] for key in list(PAIRS)[1:]}}


@pytest.mark.parametrize(("keys", "reference", "scored", "meet"), [
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
])  # fmt: skip
def test_what_a_run_needs(keys: dict[str, Any], reference: bool, scored: bool, meet: bool) -> None:
    args = NeoXArgs.from_dict({**config(), **keys})
    assert (needs_reference(args), scores_reference(args)) == (reference, scored)
    assert (build_objective(args).step_baselines is not None) == meet
    mismatched = declaration_of(args).mismatched_answers(args)
    assert mismatched == ("drawn" if meet and args.train_impl == "kto" else None)
