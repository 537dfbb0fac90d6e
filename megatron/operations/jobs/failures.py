"""Classifies failures of jobs by patterns in their logs, and says which failures are safe to retry."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.operations.jobs.scheduler import NO_LOG, Job

_LINES = 6  # at most so many matching lines are shown in a report
# A line in the list of arguments that a run prints. Its value may contain words of a pattern, so it is
# ignored.
_ARGUMENT = re.compile(r"  \w+ \.+ .*(?:updated|default)\s*$")


@dataclass(frozen=True)
class Kind:
    """A kind of failure of a job, such as "out of memory".

    safe: whether the run may be submitted again automatically once the cause is removed.
    pattern: regular expression that a line of the job's log matches.
    advice: what a person should check next.
    """

    name: str
    safe: bool
    pattern: str
    advice: str


OUT_OF_MEMORY = Kind(
    "out of memory", False,
    r"out of memory|OutOfMemory|oom-kill|oom_kill|can't allocate memory|Cannot allocate memory|std::bad_alloc",
    "the error line names the keys that save memory, best first; try a smaller train_micro_batch_size_per_gpu",
)  # fmt: skip
PORT = Kind(
    "port in use", True,
    r"port \d+ (?:of host \S+ )?(?:is taken|cannot be used)|Address already in use|EADDRINUSE|"
    r"is already at \S+:\d+, from",
    "find the program that uses the port (ss -ltnp); if a configuration file sets master_port, remove it: all jobs "
    "of that file use the same port",
)  # fmt: skip
LOCK = Kind(
    "stale lock", True,
    r"another run is writing there",
    "find the run that writes to the same `save` (tools/jobs.py list); give each run its own folder",
)  # fmt: skip
NODE = Kind(
    "node failure", True,
    r"Slurm gave this node \d+ GPUs|DUE TO NODE FAILURE|NODE_FAIL|\bXid\b|uncorrectable ECC|fallen off the bus|"
    r"Driver/library version mismatch|CUDA-capable device\(s\) is/are busy|launch failed|"
    r"(?:is|was) not heard of|Unable to contact slurmd|Node failure on|"
    r"srun: error: .*(?:Node|Communication connection) failure",
    "check the node's health (nvidia-smi, dmesg), tell its operators, and submit without it: sbatch --exclude=NODE",
)  # fmt: skip
FOLDER = Kind(
    "missing output folder", True,
    r"(?:Could not open|Unable to open) (?:stdout|stderr|output) file.*No such file",
    "check that the nodes can create the folder of the log and write to it",
)  # fmt: skip
NOT_FINITE = Kind(
    "hyper-parameters", False,
    r"is not finite|fp16 overflows in a row|loss scale cannot recover|NonFinite|are not finite",
    "check learning rate, warm-up, initialisation, precision, and the data of the step that the log names",
)  # fmt: skip
CONFIGURATION = Kind(
    "configuration", False,
    r"error: \S+\.ya?ml(?::\d+)?: |ConfigError|error: \w[\w.]*: .*(?:unknown|expected|must be|does not fit|is required|"
    r"has no effect|[;:] (?:set|change|remove|raise|lower|correct|choose|install|add)\b)",
    "correct the file, line and key that the log names; `python deepy.py --dry-run train.py CONFIG` checks a "
    "configuration without a job",
)  # fmt: skip
DATA = Kind(
    "data", False,
    r"DataError|"
    r"\S+\.(?:bin|idx|jsonl|npy)\b.*(?:No such file|not there|bytes|not an index|cut off|describes|cannot be)|"
    r"no such file.*(?:document|\.bin|\.idx)|training samples, but|index maps|document boundaries|"
    r"error: .*\bdata_paths?\b",
    "check the files that the log names with tools/datasets/inspect.py, or preprocess them again",
)  # fmt: skip
CHECKPOINT = Kind(
    "checkpoint", False,
    r"CheckpointError|manifest\.json|global_step\d+.*(?:damaged|incomplete|missing|differs)",
    "find the damaged files with tools/ckpts/verify.py; load_fallback: true loads the checkpoint before this one",
)  # fmt: skip
DISK = Kind(
    "disk", False,
    r"No space left on device|Disk quota exceeded|cannot be written|Read-only file system|Stale file handle",
    "check space and quota of the file system that the log names",
)  # fmt: skip
TIME = Kind(
    "time",
    False,
    r"DUE TO TIME LIMIT",
    "give the job more time (sbatch --time), or wait for fewer iterations (--watch)",
)
CANCELLED = Kind("cancelled", False, r"(?!)", "find out who cancelled the job, and why")
STUCK = Kind(
    "stuck", False, r"made no progress in time|did not come to|gets no answer from rank|Watchdog caught collective",
    "read the stack traces at the end of the log and in rank_*.log; check the network (docs/slurm.md, The network)",
)  # fmt: skip
UNKNOWN = Kind("unknown", False, r"(?!)", "read the last lines of the log (below) and of the ranks' own logs")

# In the order of search: the first kind with a matching line is chosen.
KINDS = (
    OUT_OF_MEMORY, FOLDER, PORT, LOCK, NODE, NOT_FINITE, DATA, CHECKPOINT, DISK, CONFIGURATION, TIME, STUCK,
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """The kind of failure of a job, and the log lines that are the evidence for it."""

    kind: Kind
    lines: tuple[str, ...]


def classify(job: Job, lines: Sequence[str]) -> Failure:
    """Returns the kind of a job's failure, with the log lines that show it.

    lines: the end of the job's log; [] if there is no log."""
    if job.exit_code == NO_LOG and not lines:
        return Failure(FOLDER, (f"Slurm could not open the log {job.log}",))
    lines = [line for line in lines if not _ARGUMENT.match(line)]
    state_kind = {
        "NODE_FAIL": NODE, "BOOT_FAIL": NODE, "OUT_OF_MEMORY": OUT_OF_MEMORY, "TIMEOUT": TIME, "DEADLINE": TIME,
        "CANCELLED": CANCELLED,
    }.get(job.state)  # fmt: skip
    if state_kind is not None:
        return Failure(state_kind, (f"Slurm: {job.state}", *_matching(state_kind, lines)))
    for kind in KINDS:
        if matched_lines := _matching(kind, lines):
            return Failure(kind, matched_lines)
    return Failure(UNKNOWN, tuple(line.rstrip() for line in lines if line.strip())[-_LINES:])


def bad_node(job: Job, lines: Sequence[str]) -> str | None:
    """Returns the node to exclude when a failed job is submitted again; None if no single node is to blame.

    It is the node that a log line reports as failed, else the only node of a one-node job. lines: end of the
    log."""
    text = "\n".join(lines)
    patterns = (r"sbatch --exclude=([\w.-]+)", r"Node failure on ([\w.-]+)", r"error: Node ([\w.-]+) ")
    for pattern in patterns:
        if match := re.search(pattern, text):
            return match[1]
    return job.node_list if re.fullmatch(r"[\w.-]+", job.node_list) and job.node_list != "None" else None


def _matching(kind: Kind, lines: Sequence[str]) -> tuple[str, ...]:
    matches = [line.strip() for line in lines if re.search(kind.pattern, line)]
    return tuple(dict.fromkeys(matches))[-_LINES:]
