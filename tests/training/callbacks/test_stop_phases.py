"""A stop signal in each phase that takes long: acknowledged before the phase's next batch, obeyed there, and
followed by a checkpoint. By the order of events, as `train.py` makes the runs."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron.process import stop_signals
from tests.evaluation.runs import make_tasks
from tests.methods.distillation.runs import LABELLED, student
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.methods.reinforcement.toy import with_keys, write_task
from tests.pool import run_ranks
from tests.training.runs import LLAMA, NEOX, config, metric_rows

STEPS = 3
SMALL = {"num_layers": 2, "train_iters": STEPS, "eval_interval": 2, "checkpoint_factor": 100, "split": "80,10,10"}
VALIDATES = {"eval_iters": 3, "train_micro_batch_size_per_gpu": 8}


@dataclass(frozen=True)
class Phase:
    """A phase of a run that a signal interrupts.

    keys: of a run in this folder. batch: module and name of the function that does a batch. signal_batch: the
    batch that the signal comes in. iteration: where the run ends. constants: of modules, so that batches are
    small. finished: whether the phase always ends, as a checkpoint does. saves: whether there is a model to
    save yet. events_before: events before the signal.
    """

    keys: Callable[[Path], dict[str, Any]]
    batch: str
    signal_batch: int
    iteration: int
    number: signal.Signals = signal.SIGTERM
    constants: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    saves: bool = True
    events_before: tuple[str, ...] = ()


def text(**overrides: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: config(NEOX, SMALL, overrides, index_cache_dir=str(folder / "maps"))


def evaluated(folder: Path) -> dict[str, Any]:
    make_tasks(folder)
    return config(NEOX, SMALL, eval_tasks=["shipped_choice"], eval_limit=20)


def demos(folder: Path) -> dict[str, Any]:
    (folder / "prompts.txt").write_text("the lantern\nthe old\n")
    return config(NEOX, SMALL, demo_prompts=str(folder / "prompts.txt"), maximum_tokens=6, max_position_embeddings=64)


def rewarded(folder: Path, *functions: str) -> dict[str, Any]:
    return with_keys(
        write_task(folder), {"reward_functions": [f"{folder / 'rewards.py'}:{name}" for name in functions]}
    )


def compared(folder: Path, *parts: dict[str, Any]) -> dict[str, Any]:
    return pairwise(
        pairs(folder), SMALL | {"split": None, "pack_impl": "unpacked"}, *parts, train_micro_batch_size_per_gpu=2
    )


def student_keys(folder: Path, *parts: dict[str, Any], **distillation: Any) -> dict[str, Any]:
    """By the model that the phase "validation" left."""
    scores = {**distillation, **({"cache_dir": str(folder / "scores")} if distillation.get("cache") else {})}
    return student(str(folder.parent / "validation" / "save"), SMALL, *parts, **scores)


ONE_AT_A_TIME = "megatron.generation.stopping:LOOKS"
BATCHER, USR1 = "megatron.generation.batching.batcher:Batcher.step", signal.SIGUSR1
PHASES = {
    "validation": Phase(text(**VALIDATES), "megatron.training.evaluation:_values", 5, 2),
    "test": Phase(text(**VALIDATES), "megatron.training.evaluation:_values", 11, STEPS),
    "validation of pairs": Phase(
        lambda folder: compared(folder, {"dpo_loss_type": "simpo", "dpo_beta": 2.0, "eval_iters": 3}),
        "megatron.training.engine:Engine.forward_only", 2, 0,
    ),
    "index maps": Phase(text(eval_iters=1), "megatron.data.text_sets:build_maps", 1, 0, USR1, saves=False),
    "reference": Phase(
        compared, "megatron.training.reference.model:_rows_by_name", 2, 0, USR1,
        {"megatron.training.reference.model:_TOKENS_AT_ONCE": 1},
    ),
    "teacher": Phase(
        lambda folder: student_keys(folder, cache=True, top_k=4), "megatron.methods.distillation.cache:_rows_of", 2, 0,
        USR1, {"megatron.methods.distillation.cache:_TOKENS_AT_ONCE": 1},
    ),
    "lm-eval": Phase(
        evaluated, "megatron.evaluation.model_operations:score", 2, 0, signal.SIGINT,
        {"megatron.evaluation.language_model:_FIRST_PART": 1},
    ),
    "demos": Phase(demos, BATCHER, 2, 0, constants={ONE_AT_A_TIME: 1}),
    "answers": Phase(lambda folder: rewarded(folder, "wordy"), BATCHER, 2, 0, constants={ONE_AT_A_TIME: 1}),
    "judging": Phase(
        lambda folder: rewarded(folder, "wordy", "lengths"),
        "megatron.methods.reinforcement.rewards.lane:Lane._receive", 1, 0,
    ),
    "answers of the student": Phase(
        lambda folder: student_keys(folder, LABELLED, {"pack_impl": "unpacked"}, lmbda=1.0, max_new_tokens=8),
        BATCHER, 2, 0, constants={ONE_AT_A_TIME: 1},
    ),
    "export": Phase(
        lambda folder: config(LLAMA, SMALL, save_hf=0, async_save=False),
        "megatron.checkpointing.huggingface.exporting:load_weights", 2, STEPS, events_before=("saved",),
    ),
    "checkpoint": Phase(
        text(checkpoint_factor=1, async_save=False), "megatron.training.checkpoint.pieces:save_tensors", 2, 1,
        finished=True,
    ),
}  # fmt: skip


class Patched:
    """Attributes of modules and classes, by `module:name`, for a time."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, place: str, change: Callable[[Any], Any]) -> None:
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        owner = import_module(module)
        for attribute in owners:
            owner = getattr(owner, attribute)
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, change(getattr(owner, name)))

    def undo(self) -> None:
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)


def events_of(phase: Phase, keys: dict[str, Any]) -> tuple[int, list[str]]:
    """The exit code of the run, and what happened in order."""
    import train

    events, patched = list[str](), Patched()

    def recorded(event: str, real: Any) -> Any:
        def done(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            if event == "batch" and events.count("batch") == phase.signal_batch:
                os.kill(os.getpid(), phase.number)
                while "acknowledged" not in events:  # by the main thread, which this one may not be
                    pass
            return real(*args, **kwargs)

        return done

    patched.set(phase.batch, lambda real: recorded("batch", real))
    patched.set("megatron.process.stop_signals:say_at_once", lambda real: recorded("acknowledged", real))
    patched.set("megatron.training.checkpoint.writer:publish", lambda real: recorded("saved", real))
    patched.set("megatron.training.loop:_advance", lambda real: recorded("step", real))
    for place, value in phase.constants.items():
        patched.set(place, lambda real, value=value: value)  # type: ignore[misc]
    noted = stop_signals.StopHandler(lambda: "noted", ends_at_second=False)
    signal.signal(signal.SIGUSR1, noted)  # as `begin_process` does
    try:
        return train.main(train_args(keys)), events
    finally:
        patched.undo()


def train_args(keys: dict[str, Any]) -> Any:
    from megatron.neox_arguments import NeoXArgs

    return NeoXArgs.from_dict(keys)


def each_phase(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, tuple[int, list[str]]]:
    """For the pool: all phases, one run after another."""
    events_by_phase = {}
    for name in names:
        phase_folder = folder / name
        phase_folder.mkdir()
        save = {key: str(phase_folder / "save") for key in ("save", "load")}
        events_by_phase[name] = events_of(
            PHASES[name], {"checkpoint_factor": 100, **PHASES[name].keys(phase_folder), **save}
        )
    return events_by_phase


@pytest.fixture(scope="module")
def stopped_phases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, list[str]]]]:
    folder = tmp_path_factory.mktemp("phases")
    return folder, run_ranks(each_phase, 1, folder, list(PHASES), timeout=300, init=False)[0]


@pytest.mark.parametrize("name", PHASES)
def test_a_signal_is_acknowledged_and_obeyed_before_the_next_batch(name: str, stopped_phases: Any) -> None:
    phase, (folder, events_by_phase) = PHASES[name], stopped_phases
    code, events = events_by_phase[name]
    save, number = folder / name / "save", phase.number
    assert code == 0
    begins = len(events) - events[::-1].index("acknowledged") - 1
    assert events[begins - 1] == "batch" and events.count("acknowledged") == 1
    later_events = [event for event in events[begins + 1 :] if event != "batch" or not phase.finished]
    assert later_events == ["saved"] * (phase.saves and not phase.events_before)
    assert [event for event in events[:begins] if event == "saved"] == list(phase.events_before)
    assert events.count("step") == phase.iteration
    status = json.loads((save / "status.json").read_text())
    assert (status["status"], status["iteration"]) == ("stopped", phase.iteration)
    assert status["reason"] == f"signal {number.name}"
    if phase.saves:
        assert (save / "latest").read_text() == f"global_step{phase.iteration}"


def restart_phases(rank: int, world_size: int, folder: Path, names: list[str]) -> None:
    """For the pool: the next start of some phases' runs."""
    import train

    for name in names:
        save = {key: str(folder / name / "save") for key in ("save", "load")}
        assert train.main(train_args({"checkpoint_factor": 100, **PHASES[name].keys(folder / name), **save})) == 0


def test_what_was_given_up_after_the_last_step_is_made_up_for(stopped_phases: Any) -> None:
    folder, _ = stopped_phases
    assert not (folder / "export" / "save" / "huggingface" / f"global_step{STEPS}").exists()
    run_ranks(restart_phases, 1, folder, ["test", "export"], init=False)
    assert (folder / "export" / "save" / "huggingface" / f"global_step{STEPS}" / "model.safetensors").is_file()
    rows = metric_rows(folder / "test" / "save", "test/lm_loss")
    assert [row["iteration"] for row in rows] == [STEPS]
    for name in ("test", "export"):
        status = json.loads((folder / name / "save" / "status.json").read_text())
        assert (status["status"], status["iteration"]) == ("finished", STEPS)


def signal_last_rank(rank: int, world_size: int, keys: dict[str, Any]) -> list[str]:
    """For the pool: the last rank gets a signal in the second batch of the validation after step 2."""
    phase = Phase(text(), "megatron.training.evaluation:_values", 8 if rank == world_size - 1 else 10**6, 2)
    return events_of(phase, keys)[1]


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"pipe_parallel_size": 2}, marks=pytest.mark.more)], ids=["dp2", "pp2"]
)
def test_one_ranks_signal_ends_a_phase_of_all(layout: dict[str, Any], tmp_path: Path) -> None:
    """A batch later, for nobody waits."""
    save = {key: str(tmp_path / "save") for key in ("save", "load")}
    keys = config(NEOX, SMALL, layout, save, eval_iters=6, train_micro_batch_size_per_gpu=4)
    rank0_events, rank1_events = run_ranks(signal_last_rank, 2, keys)
    assert rank1_events.count("acknowledged") == 1 and "acknowledged" not in rank0_events
    assert (
        rank0_events.count("batch") == rank1_events.count("batch") == 6 + 3
        and rank0_events.count("step") == rank1_events.count("step") == 2
    )
    status = json.loads((tmp_path / "save" / "status.json").read_text())
    assert (status["status"], status["iteration"]) == ("stopped", 2)
    assert (tmp_path / "save" / "latest").read_text() == "global_step2"
