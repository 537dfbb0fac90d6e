"""Environments as users write them, good ones and bad ones. They import nothing of ours."""

import os
import random
import subprocess
import sys
import time

RESET_SEEDS: list[int] = []


class Echo:
    """Says what it was told, and is over after as many steps as its row says."""

    def reset(self, prompt, seed, steps=2, **columns):
        RESET_SEEDS.append(seed)
        self.left, self.completions = steps, []
        return f" ({len(RESET_SEEDS)})"

    def step(self, completion):
        self.left -= 1
        self.completions.append(completion)
        return "/".join(self.completions), 0.5, self.left == 0


class Draws:
    def reset(self, prompt, seed, **columns):
        return f"{random.random()} {random.Random(seed).random()}"

    def step(self, completion):
        return None, None, True


class Misbehaves:
    def reset(self, prompt, seed, **columns):
        if "starts" in columns:
            self.step(columns["starts"])

    def step(self, completion):
        if completion == "raise":
            raise ValueError("no such move")
        if completion == "hang":
            time.sleep(60)
        if completion == "exit":
            sys.exit(3)
        if completion == "die":
            os._exit(9)
        if completion == "writes":
            for number in range(3, 256):
                try:
                    os.write(number, b'{"observation": "a", "reward": 1.0, "done": true}\n')
                except OSError:
                    pass
        if completion == "child":
            with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
                return str(child.pid), None, self.leave(child)
        return {
            "pair": ("a", 1.0), "nan": ("a", float("nan"), False), "text": ("a", "1", False),
            "nothing": (None, 1.0, False), "set": ({1}, 1.0, False), "fine": ("a", None, False),
            "writes": ("a", 1.0, False),
            "bytes": (b"\xff".decode(errors="surrogateescape"), None, False),
            "model": ([{"role": "assistant", "content": "a"}], None, False),
            "roles": ([{"content": "a"}], None, False),
        }[completion]  # fmt: skip

    def leave(self, child):
        child.wait = lambda *_: 0  # goes on when the block ends
        return False


class Closes:
    """Writes down what it was given and that it was closed."""

    def reset(self, prompt, seed, file, **columns):
        self.file, self.calls = file, []

    def step(self, completion, completion_ids):
        self.calls.append([completion, completion_ids])
        if completion == "hang":
            time.sleep(60)
        return "go on", None, False

    def close(self):
        with open(self.file, "w") as stream:
            stream.write(repr(self.calls))


class Waits(Echo):
    async def reset(self, prompt, seed, **columns):
        pass


class Picky(Echo):
    def reset(self, prompt, seed):
        pass


class NoStep:
    def reset(self, prompt, seed, **columns):
        pass
