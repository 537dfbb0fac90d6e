"""Reward functions as users write them, good ones and all kinds of bad ones."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def num_completions(completions, **kwargs):
    return [float(len(completions))] * len(completions)


async def waits(completions, **kwargs):
    return [1.5 for _ in completions]


def prints(completions, **kwargs):
    print('{"judged": []}')
    sys.stdout.flush()
    os.write(1, b'{"judged": []}\n')
    os.system("echo from a child; read nothing < /dev/stdin")
    return [2.0] * len(completions)


def row_values(completions, value, **kwargs):
    """Returns what the column says, row by row."""
    return [_reward_for(row_value) for row_value in value]


def _reward_for(value):
    if value == "hang":
        time.sleep(60)
    if value == "exit":
        os._exit(3)
    if value == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if value == "raise":
        raise KeyError("what")
    if value == "sys.exit":
        sys.exit("enough")
    return {"nan": math.nan, "inf": -math.inf, "list": [1.0, 2.0], "true": True}.get(value, value)


def batch_value(completions, value, **kwargs):
    """Returns for all what the first row's column says."""
    return {"short": [1.0], "float": 0.5, "text": "12", "dict": dict.fromkeys(range(len(value)), 1.0)}[value[0]]


def only_one(completions, **kwargs):
    (text,) = completions
    return [float(len(text))]


def slow(completions, **kwargs):
    time.sleep(0.375 * len(completions))
    return [1.0] * len(completions)


def environment(completions, **kwargs):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
    assert not [name for name in names if name in os.environ] and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not [name for name, value in os.environ.items() if "hidden" in value]
    return [float("torch" in sys.modules) for _ in completions]


def writes(completions, value, **kwargs):
    """Writes what the first row's column says to every descriptor there is."""
    for number in range(3, 256):
        try:
            os.write(number, value[0].encode())
        except OSError:
            pass
    return [1.0] * len(completions)


def process(completions, **kwargs):
    """The worker's number, and that of a process it left behind, which is nobody's by then."""
    if (child := os.fork()) == 0:
        os.setsid()
        time.sleep(600)
    return [os.getpid(), child]


def number(completions, **kwargs):
    return [os.getpid() for _ in completions]


def pool(completions, **kwargs):
    """Processes that are ended by SIGTERM."""
    with multiprocessing.get_context("fork").Pool(1) as workers:
        return workers.map(abs, [-4.0] * len(completions))


def spins(completions, **kwargs):
    """Does not let go of the interpreter's lock for long, as long as any test waits, with a process in a
    session of its own."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(f"worker {os.getpid()} {child.pid}", flush=True)
    end = time.monotonic() + 300
    while time.monotonic() < end:
        pass


def no_kwargs(prompts, completions):
    return [0.0] * len(completions)


not_a_function = 3
