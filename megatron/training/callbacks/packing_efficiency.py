"""What share of the places of a step's rows was used: padding, and tokens that are trained."""

import torch
from torch import Tensor

from megatron.callbacks import Callback, TrainingRun
from megatron.data import Batch, trains_preferences
from megatron.data.packing_efficiency import count_places
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.metrics.metric_probes import sum_over_ranks

NAMES = ["train/padding_share", "train/packing_efficiency", "train/trained_share"]


class PackingEfficiency(Callback):
    """A probe (`Probe`) of the micro-batches of the steps since it was last asked; of rows that may have
    padding, or tokens that are not trained."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        self.groups = groups
        self.wanted = trains_preferences(args) or args.pack_impl != "packed" or args.train_label_data_paths is not None
        self.counts = torch.zeros(3, dtype=torch.float64)

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> None:
        """Count the places of the step's rows, on the host."""
        if self.wanted:
            self.counts += torch.tensor(count_places(batches), dtype=torch.float64)

    def values(self) -> tuple[list[str], Tensor]:
        """As `Probe.values`. Packing efficiency is what padding leaves; trained tokens are a share of
        that."""
        if not self.wanted:
            return [], torch.zeros(0)
        counts = sum_over_ranks(self.counts.to(self.groups.device), self.groups)
        self.counts = torch.zeros_like(self.counts)
        places, padding, trained = counts.unbind()
        return NAMES, torch.stack([padding / places, 1 - padding / places, trained / (places - padding)])
