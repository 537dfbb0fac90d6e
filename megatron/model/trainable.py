"""Selects the parameters that a run trains (`trainable`, `lora`), and finds the lowest layer that needs
gradients."""

import difflib
import re
from collections.abc import Iterable

from torch import nn

from megatron.model.weight_map import is_adapter, layer_params, shared_params
from megatron.neox_arguments import ConfigError, ModelArgs

ParamName = tuple[int, str]
"""(NeoX's layer index, name in the weight map). A parameter that blocks share belongs to the first block."""

EMBEDDING: ParamName = (0, "word_embeddings.weight")
_SUGGESTIONS = 4  # number of similar names in the message about a pattern that matches no parameter


def head_parameter(args: ModelArgs) -> ParamName:
    """Returns the (NeoX layer index, name) of the output layer's weight; for a tied head, that of the
    embedding."""
    if not args.no_weight_tying:
        return EMBEDDING
    return args.num_layers + 4, "rm_linear.weight" if args.score_head else "final_linear.weight"


def trained_parameters(args: ModelArgs) -> frozenset[ParamName]:
    """Returns the (NeoX layer index, name) of each parameter that is trained.

    With `lora` these are adapters, trained copies of weights, and a score head. With `trainable` they are the
    parameters that it selects; otherwise all. The weight of a tied head is the embedding.

    Raises ConfigError for a pattern that matches no parameter, or if no parameter is selected.
    """
    shared, params = shared_params(args), layer_params(args)
    all_names = [(i, p.name) for i, specs in params.items() for p in specs if p.trained and shared.get(p.name, i) == i]
    options = args.trainable
    if args.lora is not None:
        return frozenset((i, name) for i, name in all_names if is_adapter(name))
    if options is None:
        return frozenset(all_names)
    trained: set[ParamName] = set()
    if options["last_layers"]:
        blocks = range(args.num_layers + 2 - options["last_layers"], args.num_layers + 2)
        trained |= {(layer, name) for layer, name in all_names if layer in blocks and name not in shared}
    if options["head"]:
        trained.add(head_parameter(args))
    names = {f"{layer}.{name}": (layer, name) for layer, name in all_names}
    problems = []
    for pattern in options["names"] or ():
        matched = {item for text, item in names.items() if re.search(pattern, text)}
        if not matched:
            close_names = difflib.get_close_matches(
                pattern.replace("\\", ""), {name for _, name in all_names}, _SUGGESTIONS, 0.0
            )
            problems.append(
                f"{args.origin('trainable.names')}: trainable.names: {pattern} matches no parameter; similar names: "
                f"{', '.join(close_names)}; patterns are searched in LAYER.NAME, where blocks are layers 2 to "
                f"{args.num_layers + 1}"
            )
        trained |= matched
    if not trained and not problems:
        problems.append(
            f"{args.origin('trainable')}: trainable: selects no parameter to train; set last_layers, head or names"
        )
    if options["embedding_gradient"] is False and not problems:
        problems += _embedding_problems(args, trained)
    if problems:
        raise ConfigError(problems)
    return frozenset(trained)


def _embedding_problems(args: ModelArgs, trained: set[ParamName]) -> Iterable[str]:
    place = f"{args.origin('trainable.embedding_gradient')}: trainable.embedding_gradient: false"
    if args.no_weight_tying or EMBEDDING not in trained:
        yield f"{place} has an effect only if a tied head is trained, which is not so here; remove it"
    elif (0, "position_embeddings.weight") in trained:
        yield (
            f"{place} turns off gradients of the embedding layer, but position_embeddings.weight is trained there; "
            "remove one of the two from trainable"
        )


def lowest_trained(args: ModelArgs) -> int:
    """Returns the NeoX index of the lowest layer that needs gradients. Layers below it run forward without
    gradients."""
    if args.trainable is None and args.lora is None:
        return 0
    trained = trained_parameters(args)
    if args.trainable is not None and args.trainable["embedding_gradient"] is False:
        return min([layer for layer, _ in trained if layer > 0], default=args.num_layers + 4)
    return min(layer for layer, _ in trained)


def freeze(params: Iterable[tuple[int, str, nn.Parameter]], args: ModelArgs) -> None:
    """Sets `requires_grad` of a stage's parameters as `trainable` or `lora` says. Call it before an optimizer
    is created.

    params: (NeoX's layer index, name in the weight map, parameter), from `stage_parameters`.
    """
    if args.trainable is None and args.lora is None:
        return
    trained, shared = trained_parameters(args), shared_params(args)
    for layer, name, param in params:
        param.requires_grad_((shared.get(name, layer), name) in trained)
