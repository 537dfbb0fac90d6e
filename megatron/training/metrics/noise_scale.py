"""Estimates the gradient noise scale: the batch size up to which a larger batch still speeds up training.

The method is that of arXiv 1812.06162, appendix A.
"""

import torch
from torch import Tensor

from megatron.mpu import ParallelGroups
from megatron.training.engine import Parts
from megatron.training.metrics.metric_probes import sum_of_squares, sum_over_ranks


class NoiseScale:
    """Estimates B_simple = tr(Sigma) / |G|^2 in sequences, from n successive steps, in every layout.

    As in GPT-NeoX the n steps are taken as samples of one gradient, which holds while weights change little.
    G_b is the gradient of one step (batch size b), G_B the mean over n steps (batch size B = n b):
        |G|^2     ~ (B |G_B|^2 - b |G_b|^2) / (B - b)
        tr(Sigma) ~ (|G_b|^2 - |G_B|^2) / (1/b - 1/B)
    Both estimates are unbiased. Each has a moving average, and the noise scale is the ratio of the averages.
    |G_b|^2 is the mean over all n steps (GPT-NeoX: of the last step). Every start of the run begins new
    averages.
    """

    BETA = 0.99  # NeoX's

    def __init__(self, batch_size: int, n_batches: int, groups: ParallelGroups, cpu_offload: bool = False) -> None:
        self._small_batch, self._n, self._groups = batch_size, n_batches, groups
        self._store = torch.device("cpu") if cpu_offload else groups.device
        self._mean: dict[tuple[int, str], Tensor] = {}
        self._small = torch.zeros((), dtype=torch.float64, device=groups.device)
        self._count = 0
        self._averages: Tensor | None = None  # [tr(Sigma), |G|^2]; the start's bias is the same in both and cancels

    def add(self, parts: Parts) -> None:
        """Add the gradient of a step. parts: the parts that this rank owns. All ranks call it in every
        step."""
        self._count += 1
        self._small += sum_of_squares([part for _, part in parts], self._groups.device) / self._n
        for name, part in parts:
            if name not in self._mean:
                self._mean[name] = torch.zeros_like(part, dtype=torch.float32, device=self._store)
            self._mean[name].add_(part.to(self._store), alpha=1.0 / self._n)
        if self._count == self._n:
            self._finish()

    def _finish(self) -> None:
        big = sum_of_squares(list(self._mean.values()), self._groups.device)
        small_square, big_square = sum_over_ranks(torch.stack([self._small, big]), self._groups)
        b, big_batch = self._small_batch, self._small_batch * self._n
        noise = (small_square - big_square) / (1.0 / b - 1.0 / big_batch)
        signal = (big_batch * big_square - b * small_square) / (big_batch - b)
        previous = 0.0 if self._averages is None else self._averages
        averages = self.BETA * previous + (1.0 - self.BETA) * torch.stack([noise, signal])
        # A non-finite gradient spoils the estimate of its n steps only.
        self._averages = torch.where(averages.isfinite().all(), averages, torch.zeros_like(averages) + previous)
        self._mean, self._count = {}, 0
        self._small = torch.zeros_like(self._small)

    def values(self) -> tuple[list[str], Tensor]:
        """Returns (["train/noise_scale"], its value `[1]`, fp64 on the device); no name before the first n
        steps are complete."""
        if self._averages is None:
            return [], torch.zeros(0)
        return ["train/noise_scale"], (self._averages[0] / self._averages[1]).view(1)
