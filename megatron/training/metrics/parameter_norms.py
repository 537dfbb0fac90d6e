"""Computes the norms of weight, gradient and optimizer state of each full parameter, equal in any layout."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import vector_norm

from megatron.distributed import run_on_all_ranks
from megatron.model import named_params, trained_parameters
from megatron.neox_arguments import NeoXArgs
from megatron.training.engine import Engine, Parts
from megatron.training.metrics.metric_probes import sum_over_ranks
from megatron.training.optimizers import norm_dtype


class ParameterNorms:
    """Computes the metrics that `log_param_norm`, `log_grad_norm`, `log_grad_pct_zeros` and
    `log_optimizer_states` turn on.

    Names are GPT-NeoX's, such as `gradient_norms/2.attention.dense.weight`. Only trained parameters count.
    Gradients are those of the global batch before clipping, so their squared norms add up to the square of
    train/grad_norm. Weights and optimizer state are fp32, after the update.
    """

    def __init__(self, engine: Engine) -> None:
        self.args, self.groups, self.engine = engine.args, engine.groups, engine
        trained = trained_parameters(self.args)  # a parameter that blocks share is named after the first block
        specs = {name: spec for name, spec in named_params(self.args).items() if name in trained}
        self._names = list(specs)
        self._sizes = torch.tensor([float(torch.Size(spec.shape).numel()) for spec in specs.values()])
        self._sizes = self._sizes.to(self.groups.device, torch.float64)
        self._gradients: list[Tensor] = []
        self._states: list[str] = []

    @staticmethod
    def is_enabled(args: NeoXArgs) -> bool:
        """Returns whether the configuration turns on any metric of this class."""
        gradients = args.log_grad_norm or args.log_grad_pct_zeros
        return gradients or args.log_param_norm or args.log_optimizer_states

    def on_gradients(self, parts: Parts) -> None:
        """Measure the gradients of a step before its update. parts: the parts that this rank owns."""
        self._gradients = [self._squares(parts), self._measure_all(parts, lambda part: (part == 0).sum())]

    def values(self) -> tuple[list[str], Tensor]:
        """Returns (names, values `[names]`) of all configured norms. Call it after the update."""
        args, squares, labels = self.args, [], []
        if args.log_grad_norm:
            squares.append(self._gradients[0])
            labels.append("gradient_norms/{}")
        if args.log_param_norm:
            squares.append(self._squares(self.engine.sharded_weights()))
            labels.append("parameter_norms/{}")
        if args.log_optimizer_states:
            states = self.engine.sharded_states()
            if not self._states:  # a rank that owns no parameter must learn the keys from others
                self._states = sorted(set().union(*run_on_all_ranks(self.groups, lambda: list(states))))
            squares += [self._squares(states.get(key, [])) for key in self._states]
            labels += ["optimizer_state_norms/{}_" + key for key in self._states]
        zeros = [self._gradients[1]] if args.log_grad_pct_zeros else []
        if not squares and not zeros:  # the optimizer has no state, or none yet
            return [], torch.zeros(0, device=self.groups.device)
        rows = sum_over_ranks(torch.stack([*squares, *zeros]), self.groups)
        values = list(rows[: len(squares)].sqrt())
        if zeros:
            values.append(100.0 * rows[-1] / self._sizes)
            labels.append("pct_grad_zeros/{}")
        names = [label.format(f"{layer}.{name}") for label in labels for layer, name in self._names]
        return names, torch.cat(values)

    def _squares(self, parts: Parts) -> Tensor:
        return self._measure_all(parts, lambda part: vector_norm(part, dtype=norm_dtype(part.device))).square()

    def _measure_all(self, parts: Parts, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns `measure` of this rank's part of each trained parameter of the model, `[parameters]` fp64.

        The value is 0 for parameters of which this rank owns no part.
        """
        device = self.groups.device
        measured = {name: measure(part).to(device, torch.float64) for name, part in parts}
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([measured.get(name, zero) for name in self._names])
