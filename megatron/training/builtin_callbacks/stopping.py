"""Decides when a run stops before its last step, and when a timed save is due.

Reasons are signals, limits of steps and time, and requests of callbacks. All ranks decide alike.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.distributed import run_on_all_ranks
from megatron.process import StopRequested, stop_reason, stop_signal
from megatron.training.run import Training


class Agreement:
    """Computes the maximum of values over all ranks, on the CPU, while the next step or batch runs.

    The maxima of the values that ranks pass after one step are returned after the next step, on every rank
    alike. So a rank waits only for ranks that are a whole step behind.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """group: a gloo group of all ranks; None if there is only one rank."""
        self._group = group
        self._work: dist.Work | None = None
        self._values: torch.Tensor | None = None

    def exchange(self, values: list[int]) -> list[int] | None:
        """Returns the maxima over all ranks of the values of the previous call, and starts to exchange
        `values`.

        The first call returns None. With a single rank every call returns `values`.
        """
        if self._group is None:
            return values
        agreed = None
        if self._work is not None and self._values is not None:
            self._work.wait()
            agreed = self._values.tolist()
        self._values = torch.tensor(values, dtype=torch.int64)
        self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def settle(self) -> None:
        """Wait for the exchange in progress. The next call of `exchange` still returns its result."""
        if self._work is not None:
            self._work.wait()

    def close(self) -> None:
        """Wait for the exchange in progress, and drop its result."""
        self.settle()
        self._work = None


class StopCallback(Callback):
    """Decides at the end of every step whether the run stops, and whether a save by time or request is due.

    It writes the decision to `training.loop`, where later callbacks read it. All ranks decide alike: a signal
    or request on one rank counts for all.
    """

    def __init__(self, training: Training, settle_result: Callable[[], None] = lambda: None) -> None:
        """settle_result: waits for the result of the last step. It is called before the exception of a failed
        background write ends the run."""
        self.training, self._settle_result = training, settle_result
        self.write_failed = False  # a background write failed on some rank; set on all after the same step
        group = dist.new_group(backend="gloo") if training.groups.world_size > 1 else None
        self._agreement, self._batch_agreement = Agreement(group), Agreement(group)
        self._decides = training.groups.world_rank == 0  # only the clock of rank 0 counts
        self._start_time = self._saved = time.monotonic()
        training.loop.look_for_stop, training.loop.agree_on_stop = self.look_for_stop, self.agree_on_stop

    def look_for_stop(self) -> None:
        """Raise StopRequested on all ranks once a stop signal has come to some rank.

        All ranks call it between the batches of long work. A signal on one rank takes effect a batch later:
        ranks wait only for those that are a whole batch behind.
        """
        if self.training.loop.stop_signal:
            raise StopRequested(self.training.loop.stop_signal)
        agreed = self._batch_agreement.exchange([stop_signal()])
        if agreed is not None and agreed[0]:
            self._note(agreed[0])
            raise StopRequested(agreed[0])

    def agree_on_stop(self) -> None:
        """Set the loop's `stop_reason` on all ranks if some rank has received a stop signal.

        All ranks call it together and wait for each other: use it before the first step and after long work.
        """
        number = max(run_on_all_ranks(self.training.groups, stop_signal))
        if number:
            self._note(number)

    def _note(self, number: int) -> None:
        loop = self.training.loop
        loop.stop_signal = number
        loop.stop_reason = loop.stop_reason or stop_reason(number)

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Decide whether to stop and whether to save. Raises the exception of a failed background write."""
        if step.result is None:
            return
        loop = self.training.loop
        loop.stop_reason, loop.save_is_due = self.decide(step.iteration)
        if self.write_failed:
            self._settle_result()
            self.training.checkpointer.wait()  # raises the writer's problem

    def decide(self, iteration: int) -> tuple[str | None, bool]:
        """Returns (reason why the run stops after this iteration, whether a save is due), the same on every
        rank.

        The reason is None if the run does not stop.
        """
        args, loop, now = self.training.args, self.training.loop, time.monotonic()
        timed_out = args.exit_duration_in_mins is not None and now - self._start_time >= args.exit_duration_in_mins * 60
        save = args.save_interval_in_mins is not None and now - self._saved >= args.save_interval_in_mins * 60
        if save:
            self._saved = now  # so that it is requested only once, as ranks agree a step later
        timed_out, save = timed_out and self._decides, save and self._decides
        flags = [timed_out, save or loop.save_request, self.training.checkpointer.failed, loop.stop_request is not None]
        agreed = self._agreement.exchange([stop_signal(), *map(int, flags)])
        loop.save_request = False  # it has been sent to all ranks
        self.write_failed = agreed is not None and bool(agreed[3])
        if args.exit_interval is not None and iteration % args.exit_interval == 0:
            return f"exit_interval {args.exit_interval}", False
        if agreed is None:
            return None, False
        number, timed_out, save, stop_requested = agreed[0], bool(agreed[1]), bool(agreed[2]), bool(agreed[4])
        if number:
            loop.stop_signal = number
            return stop_reason(number), save
        if timed_out:
            return f"exit_duration_in_mins {args.exit_duration_in_mins}", save
        return (loop.stop_request or "requested by a callback on another rank") if stop_requested else None, save

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Restart the clock of `save_interval_in_mins`, unless the save is ephemeral."""
        if not ephemeral and step.result is not None:
            self._saved = time.monotonic()

    def settle(self) -> None:
        """Wait for the exchange of values in progress. The next decision still uses its result."""
        self._agreement.settle()

    def close(self) -> None:
        """Wait for the exchanges of values in progress, and drop their results."""
        self._agreement.close()
        self._batch_agreement.close()
