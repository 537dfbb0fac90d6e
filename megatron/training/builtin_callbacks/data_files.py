"""Ends a run whose data files are changed in place while it reads them, before anything more is saved."""

from megatron.callbacks import Callback
from megatron.data import DataError, data_fingerprint, data_stamps
from megatron.distributed import on_rank_zero
from megatron.training.run import Training


class DataFilesCheck(Callback):
    """Compares size and time of change of the data files before each save, on rank 0.

    A file that was written to in place gives other samples than those that a checkpoint would record. A file
    that was replaced or removed does not: the run still reads the old one, which is mapped into memory.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._stamps = on_rank_zero(training.groups, lambda: data_stamps(training.args))
        training.checkpointer.before_save.append(lambda: on_rank_zero(training.groups, self.check))

    def check(self) -> None:
        """Raise DataError if the content of a file has changed in place; log other changes once."""
        args, stamps = self.training.args, data_stamps(self.training.args)
        changed = {path: stamp for path, stamp in self._stamps.items() if stamps.get(path) != stamp}
        in_place = [path for path, stamp in changed.items() if path in stamps and stamps[path].inode == stamp.inode]
        if in_place and data_fingerprint(args) != self.training.checkpointer.run.files:
            raise DataError(
                f"{in_place[0]}: was changed while the run read it, so nothing is saved after step "
                f"{self.training.checkpointer.saved_at or 0}; restore the file and start again, or set "
                "allow_changed_data: true"
            )
        self._stamps = stamps
        for path in changed:
            note = "has a new time of change, and the same content" if path in in_place else "was replaced or removed"
            advice = "" if path in in_place else "; the run still reads the old file, but its next start does not"
            self.training.logger.warning(f"{path}: {note}{advice}")
