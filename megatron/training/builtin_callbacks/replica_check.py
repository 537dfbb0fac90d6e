"""Compares the copies of weights that several ranks hold, and ends the run if their bits differ."""

import hashlib
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.checkpointing import read_latest, readable_size
from megatron.distributed import run_on_all_ranks
from megatron.distributed.rendezvous import format_ranks
from megatron.mpu.torch_versions import all_gather_single
from megatron.neox_arguments.errors import UserError
from megatron.training.checksums import checksums
from megatron.training.run import Training

_MOST_WEIGHTS = 3  # named in a message


class ReplicaMismatchError(UserError, RuntimeError):
    """Raised on all ranks if copies of a weight differ: memory or arithmetic of a device has failed.

    The same command may succeed from the last checkpoint, so the exit code is not that of a refusal.
    """

    exit_code = 75  # EX_TEMPFAIL: temporary failure


@dataclass(frozen=True)
class _Layout:
    """The copies of weights on all ranks, and the places of their checksums.

    names: of the weights of this rank that another rank holds too. slots: the largest number of them on any
        rank.
    order: int64 `[copies]`, places in the gathered checksums `[ranks, slots]`, sorted by weight.
    keys: of the weights at these places. neighbours: boolean `[copies - 1]`, whether places i and i + 1 hold
        copies of the same weight.
    """

    names: Sequence[str]
    slots: int
    order: Tensor
    keys: Sequence[int]
    neighbours: Tensor


class ReplicaCheck(Callback):
    """Compares copies at the start, every `replica_check_interval` steps, and before anything is saved."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._equal_after: int | None = None  # the last step after which all copies were equal
        self._layout = self._find_copies()
        training.checkpointer.before_save.append(self.compare)

    def _find_copies(self) -> _Layout:
        """Learns from all ranks which weights have copies. Raises ConfigError if none has."""
        args, groups = self.training.args, self.training.groups
        weights = self.training.engine.weight_copies()
        keys_by_rank = run_on_all_ranks(groups, lambda: list(map(_key, weights)))
        num_holders = Counter(chain.from_iterable(keys_by_rank))
        names = [name for name in weights if num_holders[_key(name)] > 1]
        shared = [[key for key in keys if num_holders[key] > 1] for keys in keys_by_rank]
        if not any(shared):
            raise args.error(
                "replica_check_interval",
                f"no two of the {groups.world_size} ranks hold a copy of the same weights in this layout (ZeRO shards "
                "them); remove it",
            )
        slots = max(map(len, shared))
        places = sorted((key, rank * slots + i) for rank, keys in enumerate(shared) for i, key in enumerate(keys))
        keys = [key for key, _ in places]
        neighbours = [a == b for a, b in zip(keys, keys[1:], strict=False)]
        size = sum(weights[name].nbytes for name in names)
        self.training.logger.info(
            f"replica_check_interval: every {args.replica_check_interval} steps rank 0 reads {readable_size(size)} to "
            f"compare {len(names)} of its {len(weights)} tensors of weights with copies on other ranks"
        )
        device = groups.device
        order = torch.tensor([place for _, place in places], device=device)
        return _Layout(names, slots, order, keys, torch.tensor(neighbours, device=device))

    def on_train_start(self, run: TrainingRun) -> None:
        """Compare the weights with which the run begins."""
        self.compare()

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Compare if this step is due. The host waits for the device."""
        if step.iteration > 0 and step.iteration % run.args.replica_check_interval == 0:
            self.compare()

    def compare(self) -> None:
        """Compare all copies. All ranks call it together. Raises ReplicaMismatchError on all of them."""
        groups, layout = self.training.groups, self._layout
        weights = self.training.engine.weight_copies()
        sums = F.pad(
            checksums((weights[name] for name in layout.names), groups.device), (0, layout.slots - len(layout.names))
        )
        gathered = torch.empty(groups.world_size * layout.slots, dtype=torch.int64, device=groups.device)
        all_gather_single(gathered, sums)
        gathered = gathered[layout.order]
        if bool(((gathered[1:] != gathered[:-1]) & layout.neighbours).any()):
            raise ReplicaMismatchError(self._report(gathered.tolist()))
        self._equal_after = self.training.iteration

    def _report(self, sums: Sequence[int]) -> str:
        """Returns the message of a mismatch: step, weights, ranks, and what to do. All ranks call it
        together.

        sums: checksums of the copies, in the order of the layout.
        """
        layout, groups = self._layout, self.training.groups
        ranks_by_sum: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for key, place, value in zip(layout.keys, layout.order.tolist(), sums, strict=True):
            ranks_by_sum[key][value].append(place // layout.slots)
        differing = {key: _grouped(ranks) for key, ranks in ranks_by_sum.items() if len(ranks) > 1}
        names_by_rank = run_on_all_ranks(
            groups, lambda: {_key(name): name for name in layout.names if _key(name) in differing}
        )
        places = run_on_all_ranks(groups, lambda: f"host {platform.node()}, {groups.device}")
        name_of = {key: name for names in names_by_rank for key, name in names.items()}
        findings = sorted(
            (sum(map(len, copies[1:])), name_of[key], _finding(copies, places)) for key, copies in differing.items()
        )
        number = "1 weight" if len(findings) == 1 else f"{len(findings)} weights"
        remaining = len(findings) - _MOST_WEIGHTS
        comparison = (
            f"were equal after step {self._equal_after}" if self._equal_after is not None else "were never compared"
        )
        args = self.training.args
        tag = read_latest(args.save_dir) if args.save_dir is not None else None
        origin = f"from the last checkpoint, {tag}" if tag is not None else f"from {args.load or 'the beginning'}"
        return "\n".join(
            [
                f"step {self.training.iteration}: copies of {number} differ in bits; they {comparison}",
                *(f"{name}: {text}" for _, name, text in findings[:_MOST_WEIGHTS]),
                *([f"and {remaining} more weights"] if remaining > 0 else []),
                "a device computes or stores wrongly: check it (memory errors in nvidia-smi -q -d ECC and dmesg), "
                f"leave it out, and start again {origin}; nothing was saved since then",
            ]
        )


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


def _grouped(ranks_by_sum: Mapping[int, list[int]]) -> list[list[int]]:
    """Returns the ranks of each value of a weight, most ranks first."""
    return sorted(ranks_by_sum.values(), key=lambda ranks: (-len(ranks), ranks))


def _finding(copies: Sequence[Sequence[int]], places: Sequence[str]) -> str:
    """Returns which ranks differ from which. places: host and device of each rank."""
    majority, *minorities = copies
    if len(majority) == len(minorities[0]):
        groups = " and ".join(format_ranks(ranks) for ranks in copies)
        return f"{groups} differ; without a majority nobody knows which copy is wrong"
    minority = sorted(chain.from_iterable(minorities))
    devices = "; ".join(f"rank {rank}: {places[rank]}" for rank in minority[:4])
    verb = "differs" if len(minority) == 1 else "differ"
    return f"{format_ranks(minority)} ({devices}) {verb} from {format_ranks(majority)}"
