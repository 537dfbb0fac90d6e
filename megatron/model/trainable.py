"""Which parameters a run trains (`trainable`, `lora`), and from which layer on gradients are needed."""

import difflib
import re
from collections.abc import Iterable

from torch import nn

from megatron.model.weight_map import is_adapter, layer_params, shared_params
from megatron.neox_arguments import ConfigError, NeoXArgs

ParamName = tuple[int, str]
"""(NeoX's layer index, name in the weight map); a parameter that blocks share counts as the first block's."""

EMBEDDING: ParamName = (0, "word_embeddings.weight")
_SUGGESTIONS = 4  # names shown for a pattern that matches none


def head_parameter(args: NeoXArgs) -> ParamName:
    """The weight of the output layer."""
    if not args.no_weight_tying:
        return EMBEDDING
    return args.num_layers + 4, "rm_linear.weight" if args.score_head else "final_linear.weight"


def trained_parameters(args: NeoXArgs) -> frozenset[ParamName]:
    """The parameters that are trained: all without `trainable` and `lora`; adapters and copies alone with
    `lora`. A tied head is the embedding.

    Raises ConfigError for a pattern that finds no parameter, and where none is left to train.
    """
    shared, params = shared_params(args), layer_params(args)
    every = [(i, p.name) for i, specs in params.items() for p in specs if p.trained and shared.get(p.name, i) == i]
    asked = args.trainable
    if args.lora is not None:
        return frozenset((i, name) for i, name in every if is_adapter(name))
    if asked is None:
        return frozenset(every)
    trained: set[ParamName] = set()
    if asked["last_layers"]:
        blocks = range(args.num_layers + 2 - asked["last_layers"], args.num_layers + 2)
        trained |= {(layer, name) for layer, name in every if layer in blocks and name not in shared}
    if asked["head"]:
        trained.add(head_parameter(args))
    known = {f"{layer}.{name}": (layer, name) for layer, name in every}
    problems = []
    for pattern in asked["names"] or ():
        matched = {item for text, item in known.items() if re.search(pattern, text)}
        if not matched:
            near = difflib.get_close_matches(pattern.replace("\\", ""), {name for _, name in every}, _SUGGESTIONS, 0.0)
            problems.append(
                f"{args.origin('trainable.names')}: trainable.names: {pattern} finds no parameter; near it: "
                f"{', '.join(near)}; blocks are layers 2 to {args.num_layers + 1}"
            )
        trained |= matched
    if not trained and not problems:
        problems.append(f"{args.origin('trainable')}: trainable: trains nothing; set last_layers, head or names")
    if asked["embedding_gradient"] is False and not problems:
        problems += _embedding_problems(args, trained)
    if problems:
        raise ConfigError(problems)
    return frozenset(trained)


def _embedding_problems(args: NeoXArgs, found: set[ParamName]) -> Iterable[str]:
    place = f"{args.origin('trainable.embedding_gradient')}: trainable.embedding_gradient: false"
    if args.no_weight_tying or EMBEDDING not in found:
        yield f"{place} is for a tied head that is trained; remove it"
    elif (0, "position_embeddings.weight") in found:
        yield f"{place}: position_embeddings.weight is trained, which needs that gradient; remove one of them"


def lowest_trained(args: NeoXArgs) -> int:
    """NeoX's index of the lowest layer that needs gradients: what lies below runs forwards alone."""
    if args.trainable is None and args.lora is None:
        return 0
    trained = trained_parameters(args)
    if args.trainable is not None and args.trainable["embedding_gradient"] is False:
        return min([layer for layer, _ in trained if layer > 0], default=args.num_layers + 4)
    return min(layer for layer, _ in trained)


def freeze(params: Iterable[tuple[int, str, nn.Parameter]], args: NeoXArgs) -> None:
    """Set `requires_grad` of a stage's parameters by `trainable` or `lora`; to be called before an optimizer
    or engine is made.

    params: (NeoX's layer index, name in the weight map, parameter), as `stage_parameters` gives them.
    """
    if args.trainable is None and args.lora is None:
        return
    trained, shared = trained_parameters(args), shared_params(args)
    for layer, name, param in params:
        param.requires_grad_((shared.get(name, layer), name) in trained)
