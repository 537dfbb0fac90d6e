"""Defines the entries of the tables of losses. Each kind of training declares such a table in its
`declaration.py`.

The values of `train_impl` and of the keys that name losses, their checks and the objectives are made from
these tables. To add a loss, add an entry to the table of its kind of training, and a function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class Loss:
    """A loss, as an entry of a table of losses.

    function: the function that computes it, as MODULE.NAME inside the package `megatron`.
    options: keys that this loss reads. A run may set them only if one of its losses reads them.
    needs_reference: whether the loss needs a reference model's log-probabilities of the answers.
    needs_step_baselines: whether the loss compares each example with all examples of the optimizer step.
    """

    function: str
    options: tuple[str, ...] = ()
    needs_reference: bool = False
    needs_step_baselines: bool = False

    def load_function(self) -> Callable[..., Any]:
        """Imports and returns the function that computes the loss."""
        module, _, name = self.function.rpartition(".")
        return getattr(import_module("megatron." + module), name)  # an f-string would seem to import all of it


@dataclass(frozen=True)
class TrainImpl:
    """A value of the key `train_impl`, with its losses.

    name: the value, such as "dpo".
    reads: the kind of its samples.
    key: the configuration key that names its losses; "" if there is none.
    losses: the losses that this key may name.
    options: further keys that all these losses read. A run may set them only if its `train_impl` or one of
        its losses lists them.
    online: keys that the losses also read if the model writes the samples itself (`dataset_impl: online`).
        Empty: the model cannot write the samples.
    """

    name: str
    reads: Literal["texts", "pairs", "answers", "generated"]
    key: str = ""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    online: tuple[str, ...] = ()
