"""Computes norms of weights, gradients and optimizer state for each full parameter, the same in any
layout."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.distributed import run_on_all_ranks
from megatron.model import named_params, trained_parameters
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Engine, Parts
from megatron.training.metrics.metric_probes import sum_over_ranks


class ParameterNorms:
    """Computes the norms of `log_param_norm`, `log_grad_norm`, `log_grad_pct_zeros`, `log_optimizer_states`.

    Metrics have NeoX's names, parameters those of NeoX's pipeline, `2.attention.dense.weight`. Only trained
    parameters count. Gradients are those of the global batch before clipping: their squares add up to the
    square of train/grad_norm. Weights and optimizer state are fp32, after the update.
    """

    def __init__(self, engine: Engine) -> None:
        self.args, self.groups, self.engine = engine.args, engine.groups, engine
        trained = trained_parameters(self.args)  # one parameter of all blocks is named after the first
        specs = {name: spec for name, spec in named_params(self.args).items() if name in trained}
        self._names = list(specs)
        self._sizes = torch.tensor([float(torch.Size(spec.shape).numel()) for spec in specs.values()])
        self._sizes = self._sizes.to(self.groups.device, torch.float64)
        self._gradients: list[Tensor] = []
        self._states: list[str] = []

    @staticmethod
    def is_enabled(args: NeoXArgs) -> bool:
        """Returns whether the configuration asks for any of these norms."""
        gradients = args.log_grad_norm or args.log_grad_pct_zeros
        return gradients or args.log_param_norm or args.log_optimizer_states

    def on_gradients(self, parts: Parts) -> None:
        """Measure complete gradients before the update, in a step that will be logged."""
        self._gradients = [self._squares(parts), self._measure_all(parts, lambda part: (part == 0).sum())]

    def values(self) -> tuple[list[str], Tensor]:
        """Returns names and values of all norms; call it after the update."""
        args, squares, labels = self.args, [], []
        if args.log_grad_norm:
            squares.append(self._gradients[0])
            labels.append("gradient_norms/{}")
        if args.log_param_norm:
            squares.append(self._squares(self.engine.sharded_weights()))
            labels.append("parameter_norms/{}")
        if args.log_optimizer_states:
            states = self.engine.sharded_states()
            if not self._states:  # a rank that owns no parameter does not know them
                self._states = sorted(set().union(*run_on_all_ranks(self.groups, lambda: list(states))))
            squares += [self._squares(states.get(key, [])) for key in self._states]
            labels += ["optimizer_state_norms/{}_" + key for key in self._states]
        zeros = [self._gradients[1]] if args.log_grad_pct_zeros else []
        if not squares and not zeros:  # of an optimizer that has no state, or none yet
            return [], torch.zeros(0, device=self.groups.device)
        rows = sum_over_ranks(torch.stack([*squares, *zeros]), self.groups)
        values = list(rows[: len(squares)].sqrt())
        if zeros:
            values.append(100.0 * rows[-1] / self._sizes)
            labels.append("pct_grad_zeros/{}")
        names = [label.format(f"{layer}.{name}") for label in labels for layer, name in self._names]
        return names, torch.cat(values)

    def _squares(self, parts: Parts) -> Tensor:
        return self._measure_all(parts, partial(torch.linalg.vector_norm, dtype=torch.float32)).square()

    def _measure_all(self, parts: Parts, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns a measure of each parameter of the model, fp64; 0 where this rank owns no part."""
        device = self.groups.device
        measured = {name: measure(part).to(device, torch.float64) for name, part in parts}
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([measured.get(name, zero) for name in self._names])
