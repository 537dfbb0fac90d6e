"""Finds the declarations of all kinds of training, such as language modelling or reinforcement learning.

Each kind is a folder of `megatron/methods`. In it, `declaration.py` has `METHOD`, a `MethodDeclaration`, and
`method.py` has the class `Method`. If the kind has its own keys, `checks.py` has the function `check`. A run
is of the first kind in METHODS for which `MethodDeclaration.trains` is true.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, Self, cast

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.losses import TrainImpl

METHODS = (
    "unlearning", "distillation", "language_modelling", "online_preferences", "preferences", "reward", "kto",
    "reinforcement",
)  # fmt: skip


class MethodKeys:
    """Base class of the classes that declare the keys of one kind of training. `NeoXArgs` inherits them all.

    Only code of that kind of training reads its keys, in this form: `ToyKeys.read_from(args).toy_weight`.
    """

    @classmethod
    def read_from(cls, args: object) -> Self:
        """Returns the configuration `args` itself, typed as an object with the keys of this class."""
        return cast(Self, args)


@dataclass(frozen=True)
class FurtherSet:
    """A data set that training steps read in addition to, or instead of, the training set.

    data, labels, storage: names of the keys for its files, for their labels, and for how they are read.
    enabled: name of the key that turns the set on; "": it is on if `data` is set.
    is_scored: whether a reference model may score its samples.
    """

    data: str
    labels: str
    storage: str
    enabled: str = ""
    is_scored: bool = False

    def path(self, args: object) -> str | None:
        """Returns the prefix of the set's files; None if the run has no such set."""
        return getattr(args, self.data) if not self.enabled or getattr(args, self.enabled) else None


@dataclass(frozen=True)
class MethodDeclaration:
    """Describes one kind of training to the code of configuration and data. Functions get the configuration.

    trains: whether a run is of this kind.
    keys: the class that declares its keys.
    impl: the value of `train_impl` that it adds.
    sets: further data sets that its steps read, by name.
    num_further_steps: how many of the steps [start, end), counted from 0, read a batch of each further set.
    sets_per_step: number of data sets that such a step reads.
    needs_reference: whether its losses compare the model with a reference model; None: the table of losses
        decides.
    mismatched_answers: how prompts get answers to other prompts, to estimate a KL divergence. drawn: from the
        whole set; rotated: from the micro-batch; None: they get none.
    sample_keys: values of the keys that decide what samples contain.
    log_lines: lines about its data for the start of the log.
    conditions: (key, condition in words, whether it holds); the key has no effect if its condition does not
        hold.
    loss_temperature: divisor of the logits in the loss; None: 1.
    prompts_key, prompt_files: the key that names files of prompts, used instead of a training set; these
    files.
    order_keys: keys that decide the order of prompts, with their values.
    splits_micro_batches: whether a step in smaller micro-batches has the same loss.
    eager_reason: why `compile: auto` does not compile blocks; None: it may compile them.
    has_second_model: whether a model with other layers reads the micro-batches, too.
    is_planned: whether `deepy.py plan` can plan its steps: passes of micro-batches, and the update.
    finetuned_rows: the kind of rows that `deepy.py finetune` trains in this way (finetuning/formats.py).
    """

    trains: Callable[[Any], bool]
    keys: type[MethodKeys] | None = None
    impl: TrainImpl | None = None
    sets: dict[str, FurtherSet] = field(default_factory=dict)
    num_further_steps: Callable[[Any, int, int], int] = lambda args, start, end: 0
    sets_per_step: Callable[[Any], int] = lambda args: 1
    needs_reference: Callable[[Any], bool | None] = lambda args: None
    mismatched_answers: Callable[[Any], Literal["drawn", "rotated"] | None] = lambda args: None
    sample_keys: Callable[[Any], list[str]] = lambda args: []
    log_lines: Callable[[Any], list[str]] = lambda args: []
    conditions: Callable[[Any], list[tuple[str, str, bool]]] = lambda args: []
    loss_temperature: Callable[[Any], float | None] = lambda args: None
    prompts_key: str = ""
    prompt_files: Callable[[Any], tuple[str, ...]] = lambda args: ()
    order_keys: Callable[[Any], dict[str, Any]] = lambda args: {}
    splits_micro_batches: Callable[[Any], bool] = lambda args: True
    eager_reason: Callable[[Any], str | None] = lambda args: None
    has_second_model: bool = False
    is_planned: bool = False
    finetuned_rows: str = ""


def method_module(method: str, name: str) -> ModuleType | None:
    """Returns the module `megatron.methods.<method>.<name>` of a kind of training; None if it does not
    exist."""
    # Not an f-string: tests/import_graph.py would let every module depend on every kind.
    path = ".".join(("megatron", "methods", method, name))
    return import_module(path) if find_spec(path) is not None else None


def check_methods(args: object, problems: ErrorCollector) -> None:
    """Adds problems with the keys of all kinds of training, also if keys ask for two kinds at once."""
    for method in METHODS:
        if (checks := method_module(method, "checks")) is not None:
            checks.check(args, problems)
    # A kind that adds no value of `train_impl` takes precedence over the kind that `train_impl` names.
    claims = [
        (name, declared.keys)
        for name, declared in _declarations().items()
        if declared.keys is not None and declared.impl is None and declared.trains(args)
    ]
    for name, keys in claims[1:] if not problems.lines else []:
        changed = next(f.name for f in fields(keys) if getattr(args, f.name) != f.default)  # type: ignore[arg-type]
        problems.add(changed, f"asks for training by {name}, but other keys for {claims[0][0]}; remove the keys of one")


@cache
def _declarations() -> dict[str, MethodDeclaration]:
    modules = {name: method_module(name, "declaration") for name in METHODS}
    return {name: module.METHOD for name, module in modules.items() if module is not None}


def declarations() -> Iterable[MethodDeclaration]:
    """Returns the declarations of all kinds of training."""
    return _declarations().values()


def train_impl_of_rows(kind: str) -> str | None:
    """Returns the value of `train_impl` for rows of a kind; None: its default."""
    methods = (declared for declared in declarations() if declared.finetuned_rows == kind)
    return next((declared.impl.name for declared in methods if declared.impl is not None), None)


@cache
def train_impls() -> dict[str, TrainImpl]:
    """Returns the values of `train_impl`, by name."""
    return {impl.name: impl for declaration in declarations() if (impl := declaration.impl) is not None}


def method_name(args: object) -> str:
    """Returns the name of a run's kind of training, one of METHODS."""
    return next(name for name, declaration in _declarations().items() if declaration.trains(args))


def further_sets() -> dict[str, FurtherSet]:
    """Returns the further data sets (`FurtherSet`) of all kinds of training, by name."""
    return {name: further for declaration in declarations() for name, further in declaration.sets.items()}


def planned_methods() -> list[str]:
    """Returns the names of the kinds of training that can be planned."""
    return [name for name, declared in _declarations().items() if declared.is_planned]


def declaration_of(args: object) -> MethodDeclaration:
    """Returns the declaration of a run's kind of training."""
    return _declarations()[method_name(args)]
