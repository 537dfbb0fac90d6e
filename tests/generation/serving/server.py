"""A server on ranks of the worker pool, and a model that transformers made for it."""

import json
import os
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
import transformers

from tests.checkpointing.golden import GOLDEN
from tests.generation.runs import command
from tests.launch.runs import wait_for
from tests.pool import run_ranks

FOLDER = GOLDEN / "dataset" / "hf_tokenizer"  # with a chat template
NAME = "tiny-llama"
POSITIONS = 4096
END = 300  # an end besides the tokenizer's
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64}


def make_model(folder: Path, positions: int = POSITIONS) -> transformers.LlamaForCausalLM:
    """A random Llama with the golden tokenizer, saved in `folder / NAME`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=positions, initializer_range=0.3, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = [0, END]
    model.save_pretrained(folder / NAME)
    for file in FOLDER.iterdir():
        shutil.copy(file, folder / NAME)
    return model


def make_adapters(folder: Path, name: str, seed: int = 0, **form: Any) -> Any:
    """The model of `make_model` with random adapters of peft, which lie in `folder / name`."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / NAME)
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **form)
    tuned = peft.get_peft_model(model, config).eval()
    tuned.save_pretrained(str(folder / name))
    return tuned


def greedy_texts(model: Any, prompts: Sequence[str], tokens: int) -> list[str]:
    tokenizer, texts = transformers.AutoTokenizer.from_pretrained(FOLDER), []
    for prompt in prompts:
        prompt_ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        ends = [0, tokenizer.eos_token_id, END]
        generated = model.generate(input_ids=prompt_ids, max_new_tokens=tokens, do_sample=False, eos_token_id=ends,
                                   pad_token_id=1)  # fmt: skip
        texts.append(tokenizer.decode(generated[0, prompt_ids.shape[1] :], skip_special_tokens=True))
    return texts


@dataclass
class Server:
    """A running server. results: (exit code, stdout, stderr) of every rank, once it has ended."""

    address: str
    folder: Path
    results: list[tuple[int, str, str]] = field(default_factory=list)
    signalled: bool = False

    def get(self, path: str) -> dict[str, Any]:
        return self.post(path, None)[1]

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, content and headers. body: sent as JSON, bytes as they are; None: a GET."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, json.loads(reply.read()), dict(reply.headers)
        except urllib.error.HTTPError as problem:
            return problem.code, json.loads(problem.read()), dict(problem.headers)

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.address + "/v1", api_key="none", max_retries=0, timeout=300, **options)

    def clients(self) -> openai.AsyncOpenAI:
        """For many requests at a time. Its time limit is one of connecting too, which openai has at 5 s."""
        return openai.AsyncOpenAI(base_url=self.address + "/v1", api_key="none", max_retries=0, timeout=300)

    def idle(self) -> dict[str, Any]:
        """Returns the reply of `/health` once nothing runs."""
        wait_for(lambda: not any(self.get("/health")[kind] for kind in ("running", "waiting")))
        return self.get("/health")

    def is_up(self) -> bool:
        try:
            return bool(self.get("/health").get("total_blocks"))
        except (urllib.error.URLError, ConnectionError):
            return False

    def signal(self, number: int) -> None:
        self.signalled = True
        os.kill(int((self.folder / "pid").read_text()), number)


def served(rank: int, world_size: int, argv: Sequence[str], pid: str) -> tuple[int, str, str]:
    """For the pool: tools/serve.py as typed; exit code, stdout, stderr."""
    if rank == 0:
        Path(pid).write_text(str(os.getpid()))
    return command(rank, world_size, argv, "tools/serve.py")


@contextmanager
def serving(folder: Path, world_size: int = 1, **changes: object) -> Iterator[Server]:
    """The model in `folder` behind a port of its own, until the end of the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", folder)
    (folder / "pid").unlink(missing_ok=True)
    overrides = [f"{key}={json.dumps(value)}" for key, value in {"kv_cache_gb": 0.05, **changes}.items()]
    argv = ["--hf-model", str(folder / NAME), "--port", str(port), "--set", *overrides]
    problem: list[BaseException] = []

    def work() -> None:
        try:
            server.results += run_ranks(served, world_size, argv, str(folder / "pid"), init=False, timeout=900)
        except BaseException as raised:
            problem.append(raised)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_for(lambda: not thread.is_alive() or server.is_up(), 200)
        assert thread.is_alive(), problem or server.results
        yield server
    finally:
        if thread.is_alive() and (folder / "pid").exists() and not server.signalled:
            server.signal(signal.SIGTERM)
        thread.join()
    if problem:
        raise problem[0]
    assert [code for code, _, _ in server.results] == [0] * world_size, server.results
