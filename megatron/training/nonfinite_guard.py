"""Finds steps that must not change weights: steps with NaN or Inf, or with a loss far above recent ones.

It reports the rank and the parameter where NaN or Inf arises. That costs two small kernels per gradient.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.distributed import run_on_all_ranks
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.errors import UserError

# As in GPT-NeoX: a run whose dynamic loss scale overflows so often cannot recover.
FP16_OVERFLOWS_IN_A_ROW = 50


class NonFiniteError(UserError, RuntimeError):
    """Raised after a step that gave NaN or Inf. No rank's weights were changed by that step."""


def most_skips(args: NeoXArgs) -> int:
    """Returns the number of non-finite steps in a row that may be skipped; one more ends the run."""
    if args.params_dtype == "fp16":
        return FP16_OVERFLOWS_IN_A_ROW
    return args.nonfinite_limit if args.on_nonfinite == "skip" else 0


class GradientWatch:
    """Records on the device which parameters of this rank got a gradient with NaN or Inf in a step.

    names: of the parameters. limit: from `most_skips`. After more skipped steps in a row every further
    verdict is NaN, so that no weight changes until the loop ends the run.
    """

    def __init__(self, names: Sequence[str], device: torch.device, limit: int) -> None:
        self._names, self._limit = names, limit
        self._sum_note = ""
        self._skips = torch.zeros((), device=device)  # in a row
        self._marks = torch.zeros(len(names), device=device)  # NaN marks a parameter
        self.verdict = torch.zeros((), device=device)  # of the step, over all ranks: 0, or NaN
        self._loss = torch.zeros((), device=device)

    def watch(self, params: Sequence[nn.Parameter]) -> None:
        """Check each gradient when the backward pass has computed it. params: in the order of the names.

        An engine that computes the norms of all gradients anyway calls `mark` instead.
        """
        for row, param in zip(self._marks.unbind(), params, strict=True):
            param.register_post_accumulate_grad_hook(partial(_note_gradient, row))

    def mark(self, norms: Tensor, summed: bool) -> None:
        """Mark the parameters whose gradient is not finite.

        norms: of all gradients, in the order of the names. summed: whether gradients were already summed over
        data ranks; then the rank from which NaN comes is unknown.
        """
        torch.mul(norms, 0, out=self._marks)
        self._sum_note = " in the sum over data ranks" if summed else ""

    def note_loss(self, loss: Tensor) -> Tensor:
        """Records whether the loss is finite; returns 1 if it is, else NaN.

        Multiply the loss by the result: then a non-finite loss makes gradients NaN, which every engine
        notices.
        """
        mark = loss.detach().float() * 0
        self._loss += mark
        return mark + 1

    def begin(self, weight: Tensor) -> None:
        """Begin a step. weight `[parts]`: weights of the step's loss over all ranks. If all are 0, no token
        is trained, and the step is skipped."""
        self._marks.zero_()
        self._loss.copy_(torch.where(weight.any(), 0.0, math.nan))

    def judge(self) -> None:
        """Set `verdict` to 0 or NaN from the marks of all ranks. All ranks call it before the update.

        Engines add the verdict to their gradient norm. The norm alone could miss a NaN: if ranks hold copies
        of a parameter, it counts one copy only.
        """
        mark_sum = self.local_mark
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(mark_sum)
        self.decide(mark_sum)

    @property
    def local_mark(self) -> Tensor:
        """A scalar: NaN if this rank has seen NaN or Inf in this step, else 0."""
        return self._marks.sum() + self._loss

    def decide(self, mark_sum: Tensor) -> None:
        """Set `verdict` to 0 or NaN from `mark_sum`, the sum of `local_mark` over all ranks."""
        self.verdict.copy_(mark_sum + torch.where(self._skips > self._limit, math.nan, 0.0))

    def end(self, skipped: Tensor | bool, untrained: Tensor | bool) -> Callable[[], str | None]:
        """Count the step as skipped or not.

        Returns a function that describes the non-finite loss or gradient which this rank has seen, or returns
        None if there was none. A call of that function waits for the device.
        """
        device, skips = self._skips.device, self._skips
        num_skips = (skips + 1) * on_device(skipped, device)
        skips.copy_(torch.where(on_device(untrained, device) > 0, skips, num_skips))
        loss, marks = self._loss.clone(), self._marks.clone()

        def finding() -> str | None:
            if math.isnan(float(loss)):
                return "loss is not finite"
            marked = marks.isnan().nonzero()
            return f"gradient of {self._names[int(marked[0])]} is not finite{self._sum_note}" if len(marked) else None

        return finding


def _note_gradient(row: Tensor, param: Tensor) -> None:
    # Adds 0 * sum: 0 if all elements are finite, else NaN.
    assert param.grad is not None
    row.add_(param.grad.sum(dtype=torch.float32), alpha=0)


def on_device(value: Tensor | float, device: torch.device) -> Tensor:
    """Returns a scalar tensor, fp32 on the device, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float32, non_blocking=True)
    return torch.full((), float(value), device=device)


class SpikeGuard:
    """Skips the update of a step whose loss lies more than `sigma` standard deviations above recent losses.

    It compares with up to 128 recent losses, once it has 32, as OLMo-core's SkipStepOptimizer does. Losses of
    skipped steps are not among them.
    """

    WINDOW, MIN_LOSSES = 128, 32

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.skips = False
        self.mean, self.deviation = math.nan, math.nan  # of the losses with which the last one was compared
        self._losses: deque[float] = deque(maxlen=self.WINDOW)

    def state(self) -> list[float]:
        """Returns the recent losses, for a checkpoint."""
        return list(self._losses)

    def restore(self, losses: Sequence[float]) -> None:
        """Restore recent losses that `state` had returned."""
        self._losses.extend(losses)

    def decide(self, loss: float) -> None:
        """Set `skips` to whether this loss is a spike. If it is finite and no spike, record it."""
        limit = math.inf
        if len(self._losses) >= self.MIN_LOSSES:
            self.mean, self.deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            limit = self.mean + self.sigma * self.deviation
        self.skips = loss > limit
        if not self.skips and math.isfinite(loss):
            self.accept(loss)

    def accept(self, loss: float) -> None:
        """Record a finite loss, with which later ones are compared."""
        self._losses.append(loss)


def report(finding: Callable[[], str | None], iteration: int, groups: ParallelGroups) -> str:
    """Returns one line that names the step and the ranks' findings, the rarest first. All ranks call it
    together.

    finding: describes the NaN or Inf that this rank has seen; None: it saw none.
    """
    findings = [(rank, text) for rank, text in enumerate(run_on_all_ranks(groups, finding)) if text]
    num_ranks = Counter(text for _, text in findings)
    findings.sort(key=lambda rank_and_text: num_ranks[rank_and_text[1]])
    places = "; ".join(f"rank {rank}: {text}" for rank, text in findings[:4]) or "the gradient norm is not finite"
    remaining = f" (and {len(findings) - 4} more ranks)" if len(findings) > 4 else ""
    return f"step {iteration}: {places}{remaining}"
