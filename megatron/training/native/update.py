"""Updates weights by a step's gradients, without waiting for the device."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model import Stage
from megatron.model.weight_map import block_specs, prediction_specs
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.apex import uses_apex
from megatron.training.native.apex_adam import ApexAdam
from megatron.training.native.fused_update import FusedAdamW
from megatron.training.native.muon import Muon, is_block_matrix
from megatron.training.native.qk_clip import QKClip
from megatron.training.native.shards import Shard, Weights
from megatron.training.native.stochastic_rounding import Stream, stream_number
from megatron.training.native.update_schedule import PartialUpdate, UpdateSchedule, first_uses
from megatron.training.nonfinite_guard import GradientWatch
from megatron.training.optimizers import (
    Lion,
    clip_gradients,
    leave_out,
    norm_dtype,
    set_learning_rate,
    weight_decay_groups,
)


class _Part(NamedTuple):
    """Shards that are updated together, and their optimizer. user: the module whose forward uses them
    first."""

    user: nn.Module
    shards: list[Shard]
    optimizer: torch.optim.Optimizer


class Update:
    """Computes a step's gradient norm, checks it for NaN and Inf, clips, and updates this rank's shards.

    One optimizer updates all weights. With `overlap_optimizer_with_forward` each module has an optimizer of
    its own, which runs during the next forward.
    state: the state of all optimizers, by `Shard.local`.
    averages: the moving averages of weights (`ema_decay`), fp32, by `Shard.local`; {} before the first step.
    """

    def __init__(
        self, weights: Weights, stage: Stage, args: NeoXArgs, groups: ParallelGroups, watch: GradientWatch
    ) -> None:
        self._weights, self._groups, self._watch = weights, groups, watch
        self._max_norm = args.gradient_clipping
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        overlapped = args.overlap_optimizer_with_forward is True
        shards_by_user = first_uses(stage, weights.trained) if overlapped else {stage: weights.trained}
        if not weights.trained:  # all that this pipeline stage has is frozen
            shards_by_user = {}
        self._parts = [
            _Part(user, shards, build_native_optimizer(weights, shards, args, groups))
            for user, shards in shards_by_user.items()
        ]
        for part in self._parts:
            self.state.update(part.optimizer.state)
            part.optimizer.state = self.state
        self.averages: dict[Tensor, Tensor] = {}
        self._ema_decay, self._new_share = args.ema_decay, torch.zeros(())
        threshold = args.qk_clip_threshold
        self._qk_clip = QKClip(stage, groups, threshold) if threshold is not None else None
        self._schedule = UpdateSchedule(stage, shards_by_user, groups.device) if overlapped else None
        self._fused = args.fused_update is True
        self._clips_inside = all(
            getattr(optimizer, "_step_supports_amp_scaling", False) for _, _, optimizer in self._parts
        )
        self._held = [shard.local for shard in weights.trained]
        owned = [float(shard.is_first_copy(groups)) for shard in weights.trained]
        self._owned = torch.tensor(owned, device=groups.device)
        self._zero = torch.zeros((), device=weights.state_device)

    def begin_step(self) -> None:
        """Forget the attention logits of earlier steps; call it before the first forward of a step."""
        if self._qk_clip is not None:
            self._qk_clip.begin_step()

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the last step, also of a skipped one, by name, equal on every rank."""
        return {} if self._qk_clip is None else self._qk_clip.metrics

    @torch.no_grad()
    def judge(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Returns the 2-norm of the full model's gradient, an fp32 scalar, equal on every rank.

        It is NaN if the loss or a gradient is not finite on any rank. This takes one pass over the gradients
        and one all-reduce of two numbers; QK-Clip also measures its logits. gradients: one for each trained
        shard.
        """
        if self._qk_clip is not None:
            self._qk_clip.measure()
        filled = [self._zero if g is None else g for g in gradients]
        shard_norms = self._owned  # empty, if nothing of this stage is trained
        if filled:
            norms = torch._foreach_norm(filled, 2, norm_dtype(self._weights.state_device))
            shard_norms = torch.stack(norms).to(self._groups.device, torch.float32)
        self._watch.mark(shard_norms, summed=self._groups.size("data_context") > 1)
        # A non-finite norm of a shard that does not count here gives NaN too (inf * 0), as the verdict does.
        sums = torch.stack([shard_norms.square().dot(self._owned), self._watch.local_mark])
        if self._groups.world_size > 1:
            dist.all_reduce(sums)
        self._watch.decide(sums[1])
        return sums[0].sqrt() + self._watch.verdict

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], norm: Tensor, skip: Tensor, lr: float) -> None:
        """Clip the gradients and update the weights; change nothing if `skip` is true.

        norm: from `judge`. If an optimizer cannot read `skip` on the device, the host waits for it. Call
        `finish` before the next backward.
        """
        norm, skip = norm.to(self._weights.state_device), skip.to(self._weights.state_device)
        if not self._clips_inside:
            gradients = self._judged(gradients, norm, skip)
        gradient_of = dict(zip(self._weights.trained, gradients, strict=True))
        found_inf = skip.float()
        if self._qk_clip is not None:
            self._qk_clip.decide(skip)
        if self._ema_decay is not None:
            self._new_share = (1.0 - self._ema_decay) * (1.0 - found_inf)  # 0 if the step is skipped
        scale = ((norm + 1e-6) / self._max_norm).clamp(min=1.0) if self._max_norm > 0.0 else None
        updates: dict[nn.Module, PartialUpdate] = {}
        for user, shards, optimizer in self._parts:
            set_learning_rate(optimizer, lr)
            if self._clips_inside:
                leave_out(optimizer, (), found_inf)
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
            run = partial(self._run, shards, optimizer, [gradient_of[shard] for shard in shards])
            updates[user] = PartialUpdate(run, partial(self._release, shards))
        if self._schedule is not None:
            self._schedule.start(updates)
            return
        for update in updates.values():
            update.run()
            update.release()

    def _judged(self, gradients: Sequence[Tensor | None], norm: Tensor, skip: Tensor) -> list[Tensor | None]:
        """Returns the clipped gradients, or None for each of them if `skip` is true. The host waits for
        `skip`."""
        for held, gradient in zip(self._held, gradients, strict=True):
            held.grad = gradient
        if self._max_norm > 0.0:
            clip_gradients(self._held, norm, self._max_norm)
        if bool(skip):
            return [None] * len(self._held)
        return [held.grad for held in self._held]

    @torch.no_grad()
    def _run(
        self, shards: Sequence[Shard], optimizer: torch.optim.Optimizer, shard_gradients: Sequence[Tensor | None]
    ) -> None:
        if self._ema_decay is not None:  # begins with the weights before the first update
            for shard in shards:
                if shard.local not in self.averages:
                    self.averages[shard.local] = shard.local.detach().float().clone()
        if isinstance(optimizer, FusedAdamW):
            optimizer.gradients = {
                shard.local: gradient for shard, gradient in zip(shards, shard_gradients, strict=True)
            }
        else:
            for shard, gradient in zip(shards, shard_gradients, strict=True):
                shard.local.grad = gradient
        optimizer.step()
        if self._qk_clip is not None:
            self._qk_clip.apply(shards)
        if self._ema_decay is not None:
            for shard in shards:
                self.averages[shard.local].lerp_(shard.local.detach().float(), self._new_share)
        if not self._fused or self._qk_clip is not None:  # a fused update has already written the weights
            self._weights.publish(shards)

    def _release(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            shard.local.grad = None
        self._weights.clear_gradients(shards)

    def finish(self) -> None:
        """Complete the last step's update of weights and optimizer states."""
        if self._schedule is not None:
            self._schedule.finish()

    def close(self) -> None:
        """Drop the optimizer states, and remove the hooks from modules."""
        if self._schedule is not None:
            self._schedule.close()
        self.state.clear()
        self.averages.clear()


def build_native_optimizer(
    weights: Weights, shards: Sequence[Shard], args: NeoXArgs, parallel: ParallelGroups
) -> torch.optim.Optimizer:
    """Returns the configured optimizer (AdamW, SGD, Lion or Muon) over these shards of the trained weights.

    It clips by the tensor `grad_scale` and skips by `found_inf`. `Adam` is AdamW, as in GPT-NeoX. The
    implementation of AdamW is torch's, our `FusedAdamW` or apex's.
    """
    options = args.optimizer["params"]
    matrices = []
    if args.optimizer_name == "muon":
        blocks = frozenset(spec.index for spec in (*block_specs(args), *prediction_specs(args)))
        matrices = [shard for shard in shards if is_block_matrix(shard, blocks)]
        shards = [shard for shard in shards if not is_block_matrix(shard, blocks)]
    groups = weight_decay_groups([(shard.local, shard.spec) for shard in shards], args)
    groups = [group for group in groups if group["params"]]
    if args.optimizer_name == "muon":
        return Muon(weights, matrices, groups, parallel, options, args.weight_decay)
    if args.optimizer_name == "sgd":
        sgd = torch.optim.SGD(groups, lr=args.lr, momentum=options["momentum"], fused=True)
        if options["momentum"] != 0.0:
            for group in groups:
                for param in group["params"]:
                    # Else torch makes it in the first step, and leaves it uninitialised if that step is
                    # skipped.
                    sgd.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return sgd
    if args.optimizer_name == "lion":
        return Lion(groups, lr=args.lr, betas=options["betas"])
    if weights.state_device == parallel.device and uses_apex(args, parallel.device):
        return ApexAdam(groups, lr=args.lr, betas=options["betas"], eps=options["eps"])
    if args.fused_update is True or args.optimizer_state_dtype == "bf16":
        weight_of = {shard.local: shard.param for shard in shards} if args.fused_update is True else {}
        streams = None
        if args.optimizer_state_dtype == "bf16":
            streams = {shard.local: _stream(shard, args.seed, parallel) for shard in shards}
        return FusedAdamW(groups, weight_of, args.lr, options["betas"], options["eps"], streams)
    return torch.optim.AdamW(groups, lr=args.lr, betas=options["betas"], eps=options["eps"], fused=True)


def _stream(shard: Shard, seed: int, parallel: ParallelGroups) -> Stream:
    """Returns the random stream of a shard. Tensor ranks and pipeline stages that hold copies of a weight get
    the same stream, so that the copies stay equal."""
    part = parallel.rank("tensor") if shard.spec.axis is not None else 0
    layer = 2 if shard.spec.shared else shard.layer  # NeoX's index of the model's first block
    return Stream(stream_number(seed, layer, shard.name, part), shard.start)
