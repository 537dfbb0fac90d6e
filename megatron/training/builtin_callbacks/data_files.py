"""Ends a run whose data files are changed in place while it reads them, before anything more is saved."""

from collections.abc import Mapping

from megatron.callbacks import Callback
from megatron.data import DataError, FileStamp, data_fingerprint, data_stamps
from megatron.distributed import on_rank_zero
from megatron.training.checkpoint.writer import CheckpointWriter
from megatron.training.run import Training


class DataFilesCheck(Callback):
    """Compares size and time of change of the data files before each save, on rank 0.

    A file that was written to in place gives other samples than those that a checkpoint would record. A file
    that was replaced or removed does not: the run still reads the old one, which is mapped into memory.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._stamps = training.checkpointer.run.stamps
        training.checkpointer.before_save.append(lambda: on_rank_zero(training.groups, self.check))

    def check(self) -> None:
        """Raise DataError if the content of a file has changed in place; log other changes once."""
        stamps = data_stamps(self.training.args)
        if (error := _change_error(self.training.checkpointer, self._stamps, stamps)) is not None:
            raise error
        changed, in_place = _changed(self._stamps, stamps), _changed_in_place(self._stamps, stamps)
        self._stamps = stamps
        for path in changed:
            note = "has a new time of change, and the same content" if path in in_place else "was replaced or removed"
            advice = "" if path in in_place else "; the run still reads the old file, but its next start does not"
            self.training.logger.warning(f"{path}: {note}{advice}")


def explained_by_change(problem: Exception, checkpointer: CheckpointWriter) -> Exception:
    """Returns an error that names the file if a DataError comes from data that changed under the run; else
    `problem`."""
    if not isinstance(problem, DataError) or checkpointer.args.allow_changed_data:
        return problem
    try:
        error = _change_error(checkpointer, checkpointer.run.stamps, data_stamps(checkpointer.args))
    except DataError:  # a file that cannot be opened any more, which `problem` says
        return problem
    return problem if error is None else error


def _change_error(
    checkpointer: CheckpointWriter, old_stamps: Mapping[str, FileStamp], new_stamps: Mapping[str, FileStamp]
) -> DataError | None:
    """Returns the error that names a file whose content has changed in place; None if there is none."""
    in_place = _changed_in_place(old_stamps, new_stamps)
    if not in_place or data_fingerprint(checkpointer.args) == checkpointer.run.files:
        return None
    return DataError(
        f"{in_place[0]}: was changed while the run read it, so nothing is saved after step "
        f"{checkpointer.saved_at or 0}; restore the file and start again, or set allow_changed_data: true"
    )


def _changed(old_stamps: Mapping[str, FileStamp], new_stamps: Mapping[str, FileStamp]) -> list[str]:
    return [path for path, stamp in old_stamps.items() if new_stamps.get(path) != stamp]


def _changed_in_place(old_stamps: Mapping[str, FileStamp], new_stamps: Mapping[str, FileStamp]) -> list[str]:
    return [
        path
        for path in _changed(old_stamps, new_stamps)
        if path in new_stamps and new_stamps[path].inode == old_stamps[path].inode
    ]
