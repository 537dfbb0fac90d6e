"""Entries of the tables of losses, which kinds of training declare beside their keys.

The values of `train_impl` and of the keys that name losses, their checks and the objectives are made from
these tables. A new loss is an entry of its kind's table and a function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class Loss:
    """A loss of the table.

    function: where it is defined, MODULE.NAME below the package `megatron`.
    options: keys that this loss reads. A run may set them only if one of its losses reads them.
    needs_reference: whether the loss needs a reference model's log-probabilities of the answers.
    needs_step_baselines: whether examples are compared with values of all examples of the optimizer step.
    """

    function: str
    options: tuple[str, ...] = ()
    needs_reference: bool = False
    needs_step_baselines: bool = False

    def load_function(self) -> Callable[..., Any]:
        """Returns the function."""
        module, _, name = self.function.rpartition(".")
        return getattr(import_module("megatron." + module), name)  # an f-string would seem to import all of it


@dataclass(frozen=True)
class TrainImpl:
    """A value of `train_impl`.

    name: the value.
    reads: the kind of its samples.
    key: the key that names its losses; "" if it has none.
    options: further keys that all its losses read. A run may set them only if its `train_impl` or one of its
        losses lists them.
    online: keys that its losses also read if the model writes the samples itself (`dataset_impl: online`).
        Empty: the model cannot write them.
    """

    name: str
    reads: Literal["texts", "pairs", "answers", "generated"]
    key: str = ""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    online: tuple[str, ...] = ()
