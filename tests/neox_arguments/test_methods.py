"""The kind of training of a run, where kinds with keys of their own claim it."""

from dataclasses import dataclass

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, methods
from megatron.neox_arguments.methods import MethodDeclaration, MethodKeys, method_name
from megatron.neox_arguments.values.losses import losses_of
from tests.neox_arguments.conftest import MODEL


@dataclass(frozen=True)
class ClippedKeys(MethodKeys):
    """The keys of a user's kind. These two are declared elsewhere, so that `NeoXArgs` has them already."""

    activation: str = "gelu"
    norm: str = "layernorm"


def claims_swish(args: NeoXArgs) -> bool:
    return args.activation == "swish"


PATHS = {"pos_train_data_paths": ["chosen"], "neg_train_data_paths": ["rejected"]}
PAIRS = {"dataset_impl": "pairwise", "pack_impl": "unpacked", **PATHS}
KINDS = {
    "normal": ("language_modelling", {}),
    "dpo": ("preferences", PAIRS),
    "kto": ("kto", {"pack_impl": "unpacked"}),
    "rm": ("reward", PAIRS),
}


@pytest.mark.parametrize("impl", KINDS)
def test_a_kind_with_keys_stands_above_any_train_impl(monkeypatch, impl):
    declared = methods._declarations()
    kind, needed_values = KINDS[impl]
    values = {**MODEL, "train_impl": impl, **needed_values}
    unclaimed = NeoXArgs.from_dict(values)
    assert method_name(unclaimed) == kind
    kinds = {"clipped": MethodDeclaration(claims_swish, ClippedKeys), **declared}
    monkeypatch.setattr(methods, "_declarations", lambda: kinds)
    args = NeoXArgs.from_dict({**values, "activation": "swish"})
    assert method_name(args) == "clipped" and losses_of(args) == losses_of(unclaimed)
    assert method_name(NeoXArgs.from_dict(values)) == kind


def test_two_kinds_with_keys_exclude_each_other(monkeypatch):
    kinds = {"clipped": MethodDeclaration(claims_swish, ClippedKeys), **methods._declarations()}
    monkeypatch.setattr(methods, "_declarations", lambda: kinds)
    with pytest.raises(ConfigError, match=r"(?s)ga_dataset.*unlearning.*clipped"):
        NeoXArgs.from_dict({**MODEL, "activation": "swish", "ga_dataset": "forget", "ga_mode": "interleaved"})
