"""Measures which share of a step's rows is padding, and which share of the other tokens is trained."""

import torch
from torch import Tensor

from megatron.callbacks import Callback, TrainingRun
from megatron.data import Batch, trains_preferences
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.metrics.metric_probes import sum_over_ranks

NAMES = ["train/padding_share", "train/packing_efficiency", "train/trained_share"]


class PackingEfficiency(Callback):
    """A `Probe` of the padding and the trained tokens in all micro-batches since the last logged step.

    It measures nothing if rows can have neither padding nor untrained tokens.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        self.groups = groups
        self.is_measured = (
            trains_preferences(args) or args.pack_impl != "packed" or args.train_label_data_paths is not None
        )
        self.counts = torch.zeros(3, dtype=torch.float64)

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> None:
        """Count all, padding and trained positions of the step's rows, on the host."""
        if self.is_measured:
            counts = [(batch.tokens.numel(), batch.padding, int(batch.loss_weights.sum())) for batch in batches]
            self.counts += torch.tensor(counts, dtype=torch.float64).sum(dim=0)

    def values(self) -> tuple[list[str], Tensor]:
        """Returns (names, values) of the shares over all ranks, then starts a new count.

        `padding_share` is of all positions; `packing_efficiency` is 1 minus that. `trained_share` is of the
        positions that are not padding.
        """
        if not self.is_measured:
            return [], torch.zeros(0)
        counts = sum_over_ranks(self.counts.to(self.groups.device), self.groups)
        self.counts = torch.zeros_like(self.counts)
        places, padding, trained = counts.unbind()
        return NAMES, torch.stack([padding / places, 1 - padding / places, trained / (places - padding)])
