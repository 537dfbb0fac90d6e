"""From a step's gradients to new weights, without a wait for the device."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.native.fused_update import FusedAdamW
from megatron.training.native.optimizers import build_optimizer
from megatron.training.native.shards import Weights
from megatron.training.nonfinite_guard import GradientWatch
from megatron.training.optimizers import clip_gradients, leave_out, set_learning_rate


class Update:
    """Norm, verdict, clipping and the optimizer's step over what this rank holds."""

    def __init__(self, weights: Weights, args: NeoXArgs, groups: ParallelGroups, watch: GradientWatch) -> None:
        self._weights, self._groups, self._watch = weights, groups, watch
        self._max_norm = args.gradient_clipping
        self.optimizer = build_optimizer(weights, args, groups)
        self._fused = isinstance(self.optimizer, FusedAdamW)
        self._held = [shard.local for shard in weights.trained]
        owned = [float(shard.is_first_copy(groups)) for shard in weights.trained]
        self._owned = torch.tensor(owned, device=groups.device)
        self._none = torch.zeros((), device=groups.device)

    @torch.no_grad()
    def judge(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """2-norm of the whole model's gradient, fp32 scalar, the same on every rank; NaN where anything of
        the step is not finite on any rank. One pass over the gradients, one all-reduce of two numbers."""
        given = [self._none if g is None else g for g in gradients]
        norms = torch._foreach_norm(given, 2, torch.float32) if self._fused else torch._foreach_norm(given)
        each = torch.stack(norms) if norms else self._owned
        self._watch.mark(each, summed=self._groups.size("data") > 1)
        # A norm that is not finite but not owned is no number times 0, NaN: the verdict says the same.
        sums = torch.stack([each.square().dot(self._owned), self._watch.seen])
        if self._groups.world_size > 1:
            dist.all_reduce(sums)
        self._watch.decide(sums[1])
        return sums[0].sqrt() + self._watch.verdict

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], norm: Tensor, skip: Tensor, lr: float) -> None:
        """Clip by dividing inside of the update, and change nothing where `skip` says so. With an optimizer
        that cannot do so inside, the host waits for `skip`."""
        if isinstance(self.optimizer, FusedAdamW):
            self.optimizer.gradients = dict(zip(self._held, gradients, strict=True))
        else:
            for held, gradient in zip(self._held, gradients, strict=True):
                held.grad = gradient
        set_learning_rate(self.optimizer, lr)
        inside = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if self._max_norm > 0.0 and inside:
            self.optimizer.grad_scale = ((norm + 1e-6) / self._max_norm).clamp(min=1.0)  # type: ignore[attr-defined]
        elif self._max_norm > 0.0:
            clip_gradients(self._held, norm, self._max_norm)
        leave_out(self.optimizer, self._held, skip)
        self.optimizer.step()
        if self._fused:
            return  # it has written the weights
        for held in self._held:
            held.grad = None
        self._weights.publish()
