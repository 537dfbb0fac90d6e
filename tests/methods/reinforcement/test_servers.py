"""Answers by servers: ours trains as the training process does; vLLM and SGLang are stand-ins."""

import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.data.files import sha256
from megatron.generation.weight_updates import WeightUpdate
from megatron.methods.reinforcement.keys import rollout_servers
from megatron.methods.reinforcement.server_apis import OpenAIServer
from megatron.methods.reinforcement.server_calls import Connection, ServerError
from megatron.methods.reinforcement.weight_server import WeightServer
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.errors import UserError
from megatron.objectives.preference import DIFFERENCE
from megatron.training import train
from tests.generation.serving.server import Server
from tests.launch.runs import wait_for
from tests.marks import with_more
from tests.methods.reinforcement.stand_ins import StandIn, standing_in
from tests.methods.reinforcement.test_resume import goes_on_bit_for_bit
from tests.methods.reinforcement.test_rollouts import LAYOUTS
from tests.methods.reinforcement.toy import (
    WORDS,
    StepResults,
    for_pairs,
    full_run,
    lines_of,
    started_run,
    steps_of,
    with_keys,
    write_task,
)
from tests.pool import run_ranks
from tests.training.runs import LLAMA

MODEL = {**LLAMA, "rollout.temperature": 0.0, "make_vocab_size_divisible_by": 16}
VLLM: dict[str, Any] = {"rollout.server_api": "vllm", "rollout.logprob_bound": 0}
STEPS = 3
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return with_keys(write_task(tmp_path_factory.mktemp("task")), MODEL)


@pytest.fixture(scope="module")
def in_process(server_process: Server, task: dict[str, Any]) -> StepResults:
    return run_ranks(steps_of, 1, task, STEPS)[0]


@pytest.fixture(scope="module")
def server_process(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Our server, a process of its own, which begins with other weights."""
    folder = tmp_path_factory.mktemp("server") / "model"
    torch.manual_seed(5)
    config = transformers.LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
                                      rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=0,
                                      pad_token_id=None)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(Path(task["vocab_file"]).read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": WORDS[0]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, str(ROOT / "tools" / "serve.py"), "--hf-model", str(folder), "--port", port,
             "--set", "kv_cache_gb=0.05", "serve_weight_updates=true"]  # fmt: skip
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""})
    server = Server(f"http://127.0.0.1:{port}", folder)
    wait_for(lambda: process.poll() is not None or server.is_up(), 400)
    assert process.poll() is None
    yield server
    process.terminate()
    assert process.wait(300) == 0


def with_server(task: dict[str, Any], server: Server | StandIn, folder: Path, **changes: Any) -> dict[str, Any]:
    keys = {"rollout.servers": [server.address], "rollout.sync": str(folder), "rollout.server_timeout_s": 100.0}
    return with_keys(task, {**keys, **changes})


@pytest.mark.parametrize("fetched", [False, True])
def test_our_server_trains_as_the_process_itself(
    fetched: bool, task: dict[str, Any], in_process: StepResults, server_process: Server, tmp_path: Path
) -> None:
    """By a folder, or fetched over HTTP from the trainer (serve_model_weights)."""
    values = with_server(task, server_process, tmp_path, serve_model_weights=fetched, weight_server_port=0)
    results = run_ranks(steps_of, 1, values, STEPS)[0]
    assert results.answers == in_process.answers
    assert len({str(answers) for answers in results.answers}) > 1, "weights change answers"
    assert results.losses == pytest.approx(in_process.losses, rel=1e-6, abs=1e-6)
    assert all(metrics[f"{DIFFERENCE}_max"] < 1e-4 for metrics in results.metrics)
    assert server_process.get("/health")["weight_version"] == STEPS - 1
    (folder,) = tmp_path.iterdir()  # of this run alone
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "latest"]


def test_conversations_by_our_server(task: dict[str, Any], server_process: Server, tmp_path: Path) -> None:
    keys = {"rollout.temperature": 1.0, "rollout.max_completion_length": 12, "reward_functions": None}
    file = Path(task["vocab_file"]).with_name("environments.py")
    values = with_keys(task, keys, {"rollout.environment": f"{file}:Sums", "rollout.logprob_bound": 1e-4})
    results = run_ranks(steps_of, 1, with_server(values, server_process, tmp_path), STEPS)[0]
    assert all(metrics[f"{DIFFERENCE}_max"] < 1e-4 for metrics in results.metrics)
    turn_end = [WORDS.index("<eod>"), WORDS.index("c")]  # a turn ends, and the environment says the next sum
    held = [
        tokens for answers in results.answers for tokens in answers if turn_end in map(list, itertools.pairwise(tokens))
    ]
    assert 5 < len(held) < len([tokens for answers in results.answers for tokens in answers])


@pytest.mark.product
def test_our_server_writes_pairs(task: dict[str, Any], server_process: Server, tmp_path: Path) -> None:
    """For online DPO, also where they are asked for ahead."""
    values = for_pairs(task, {"train_batch_size": 4, "rollout.temperature": 1.0})
    for staleness in (0, 1):
        run_values = with_server(values, server_process, tmp_path / str(staleness), **{"rollout.staleness": staleness})
        results = run_ranks(steps_of, 1, run_values, STEPS)[0]
        assert len(results.answers[0]) == 16 and results.losses[0] == pytest.approx(math.log(2.0), abs=1e-6)
        assert results.metrics[0][DIFFERENCE] < 1e-5 and (results.metrics[1][DIFFERENCE] < 1e-5) == (staleness == 0)


def test_our_server_keeps_its_weights_where_the_new_ones_are_none(server_process: Server, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    for body, reason in (
        ({"path": str(tmp_path / "nowhere"), "version": 1}, "has neither model.safetensors nor"),
        ({"path": str(tmp_path), "version": 1}, "config.json: no such file"),
        ({"path": str(tmp_path), "version": 1, "sha256": {"model.safetensors": "00"}}, "damaged or was replaced"),
        ({"path": str(tmp_path), "version": 1, "sha256": {"../secret": "00"}}, "is not a file name"),
        ({"version": 1}, "send exactly one of path and url"),
        ({"url": "file:///etc", "version": 1, "sha256": {"a": "00"}}, "url: "),
    ):
        status, reply, _ = server_process.post("/v1/update_weights", body)
        assert status == 400 and reason in reply["error"]["message"], reply


def test_what_vllm_and_sglang_are_asked(task: dict[str, Any], tmp_path: Path) -> None:
    """By stand-ins for both, of two runs that share a folder of weights."""
    for api, text, update in (("vllm", "/v1/completions", "/collective_rpc"),
                              ("sglang", "/generate", "/update_weights_from_disk")):  # fmt: skip
        with standing_in() as server:
            changes = {**VLLM, "rollout.server_api": api}
            results = run_ranks(steps_of, 1, with_server(task, server, tmp_path, **changes), 2)[0]
        assert all(answer[1:] == [0] for answers in results.answers for answer in answers)
        paths = [path for path, _ in server.requests]
        assert paths.count(text) == 32 and paths.count(update) == 2 and paths.index(update) < paths.index(text)
        _, update_body = server.requests[paths.index(update)]
        folder = update_body["kwargs"].pop("weights_path") if api == "vllm" else update_body["model_path"]
        assert Path(folder).name == "0" and Path(folder).parents[1] == tmp_path
        if api == "vllm":
            assert update_body["method"] == "reload_weights" and not update_body["kwargs"]
            assert paths.count("/reset_prefix_cache") == 2
        else:
            assert update_body["weight_version"] == "0" and server.version == "1"
        _, completion_body = server.requests[paths.index(text)]
        assert (
            (completion_body["return_token_ids"] and completion_body["logprobs"] == 0)
            if api == "vllm"
            else completion_body["return_logprob"]
        )
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["0", "0", "1", "1", "latest", "latest"]


def test_a_server_that_fails_in_passing_is_asked_again(task: dict[str, Any], tmp_path: Path) -> None:
    with standing_in(failures=2) as server:
        results = run_ranks(steps_of, 1, with_server(task, server, tmp_path, **VLLM), 1)[0]
    assert len(results.answers[0]) == 16 and [path for path, _ in server.requests].count("/v1/completions") == 18


@pytest.mark.parametrize("api, changes, reason", [
    ("vllm", {"garbage": b"<html>"}, "POST /v1/completions: answered no JSON"),
    ("vllm", {"garbage": b'{"choices": []}'}, "no answer with token_ids and logprobs.*vLLM 0.10.2 or later"),
    ("sglang", {"garbage": b'{"meta_info": {}}'}, "no answer with output_token_logprobs"),
    ("sglang", {"deaf": True, "version": "7"}, "answers with weights 7, but was given version 0"),
    ("vllm", {"failures": 10_000}, "answered 500: out of memory, also after 1 s"),
    ("vllm", {}, "step 1: the log-probabilities of sampler and trainer differ"),
])  # fmt: skip
def test_what_is_wrong_with_a_server_is_said(api: str, changes: dict[str, Any], reason: str, task: dict[str, Any],
                                             tmp_path: Path) -> None:  # fmt: skip
    with standing_in(**changes) as server:
        keys = {"rollout.server_api": api, "rollout.server_timeout_s": 1.0 if "failures" in changes else 100.0}
        message = run_ranks(outcome_of, 1, with_server(task, server, tmp_path, **keys))[0]
    assert re.search(reason, message), message
    assert server.address in message or "step 1" in message


def signalled_while_it_waits(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a run that gets SIGTERM."""
    with started_run(values) as (training, rollouts):
        assert rollouts.server_sampler is not None
        wait = rollouts.server_sampler._waited_for

        def signalled(answers: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return wait(answers)

        rollouts.server_sampler._waited_for = signalled  # type: ignore[method-assign]
        train(training)


def test_a_signal_ends_waiting(task: dict[str, Any], tmp_path: Path) -> None:
    """For a server that fails: a run that goes on waiting ends with what the server says."""
    with standing_in(failures=1_000_000) as server:
        keys = {"rollout.server_api": "vllm", "save": str(tmp_path / "run"), "checkpoint_factor": 4}
        run_ranks(signalled_while_it_waits, 1, with_server(task, server, tmp_path / "sync", **keys))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["iteration"], status["reason"]) == ("stopped", 0, "signal SIGTERM")


def test_a_server_that_is_not_there_is_named(task: dict[str, Any], tmp_path: Path) -> None:
    with socket.socket() as deaf:  # which nobody else can have, and which listens to none
        deaf.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        values = with_server(task, StandIn(address), tmp_path, **{"rollout.server_timeout_s": 0.5})
        message = run_ranks(outcome_of, 1, values)[0]
    assert f"rollout.servers: {address}: GET /v1/models: cannot be reached" in message


VLLM_TEXT = "model='toy', max_seq_len=16, kv_cache_dtype=auto, dtype=torch.{}, quantization=None"
SETTINGS = [
    ("vllm", {"vllm_config": VLLM_TEXT.format("float16")}, "fp16"),
    ("vllm", {"vllm_config": {"cache_config": {"cache_dtype": "auto"}, "model_config": {"dtype": "torch.bfloat16"}}},
     "bf16"),
    ("sglang", {"kv_cache_dtype": "auto", "dtype": "half", "device": "cuda"}, "fp16"),
    ("sglang", {"kv_cache_dtype": "bfloat16", "dtype": "auto"}, None),
    ("vllm", None, None),
    ("vllm", {"vllm_config": VLLM_TEXT.format("float32")}, None),
]  # fmt: skip
"""API, the server's settings, and the dtype that is refused in a run of fp32."""


def test_a_server_of_another_dtype_is_refused(task: dict[str, Any], tmp_path: Path) -> None:
    for api, settings, refused in SETTINGS:
        with standing_in(settings=settings) as server:
            keys = {"rollout.server_api": api, "rollout.logprob_bound": 5.0}
            message = run_ranks(outcome_of, 1, with_server(task, server, tmp_path, **keys))[0]
        assert ("precision" in message) == (refused is not None), (settings, message)
        if refused:
            assert f"{server.address}: the server computes in {refused}, and this run in fp32 (precision)" in message
            assert "set rollout.logprob_bound: 0" in message and not server.requests, "before any answer is asked for"


def test_our_server_tells_its_dtype(server_process: Server) -> None:
    client = OpenAIServer(Connection(server_process.address, None, 10.0, print), 1.0, (0,))
    assert client.precision() == "fp32"


def outcome_of(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: how a run of one step ends."""
    try:
        with started_run(values) as (training, rollouts):
            train(training)
    except UserError as problem:
        return str(problem)
    return "ended"


@pytest.mark.parametrize("changes, reason", [
    ({"rollout.staleness": 1}, "rollout.staleness: "),
    ({"serve_model_weights": True}, "serve_model_weights: "),
    ({"rollout.servers": ["http://a:1"], "online_dataserver_ports": 1}, "online_dataserver_ports: rollout.servers ("),
    ({"online_dataserver_ips": ["a", "b", "c"], "online_dataserver_ports": [1, 2]}, "as many hosts as ports"),
    ({"rollout.servers": ["a:1"], "rollout.sync": "x"}, "expected http://HOST:PORT"),
    ({"rollout.servers": ["http://a:1"]}, "rollout.sync: "),
    ({"rollout.servers": ["http://a:1"], "rollout.sync": "x", "rollout.exact": True}, "rollout.exact: "),
])  # fmt: skip
def test_what_configurations_ask_for_in_vain(changes: dict[str, Any], reason: str, task: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        NeoXArgs.from_dict(with_keys(task, changes))


def test_gpt_neox_names_servers_by_hosts_and_ports(task: dict[str, Any]) -> None:
    values = with_keys(task, {"rollout.sync": "x", "online_dataserver_ips": ["a", "b"]})
    assert rollout_servers(NeoXArgs.from_dict(values)) == ("http://a:10000", "http://b:10000")
    six = with_keys(task, {"online_dataserver_ips": "::1", "save": "s", "checkpoint_factor": 1})
    assert rollout_servers(NeoXArgs.from_dict(six)) == ("http://[::1]:10000",)
    assert rollout_servers(NeoXArgs.from_dict(task)) == ()


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url) as file:
        return file.read()


def test_weights_are_handed_to_whoever_knows_the_secret(
    task: dict[str, Any], server_process: Server, tmp_path: Path
) -> None:
    """Our server refuses weights that were damaged on the way."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    files = {name: sha256(tmp_path / name) for name in ("config.json", "model.safetensors")}
    with closing(WeightServer(NeoXArgs.from_dict(with_keys(task, {"weight_server_port": 0})))) as server:
        for version in range(3):
            server.offer(WeightUpdate(str(tmp_path), version, files), num_versions=2)
        url = server.url(2, server_process.address)
        assert json.loads(fetch(f"{url}/manifest.json")) == {"version": 2, "sha256": files}
        assert fetch(f"{url}/config.json") == b"config.json"
        for wrong_url in (url.replace(url.split("/")[3], "x"), f"{url}/..", server.url(0, server_process.address)):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch(f"{wrong_url}/config.json")
        (tmp_path / "model.safetensors").write_bytes(b"another")
        status, reply, _ = server_process.post("/v1/update_weights", {"url": url, "version": 2, "sha256": files})
        assert status == 400 and "damaged or was replaced" in reply["error"]["message"]
    status, reply, _ = server_process.post("/v1/update_weights", {"url": url, "version": 2, "sha256": files})
    assert status == 502 and "config.json cannot be fetched" in reply["error"]["message"]


def test_the_port_of_weights_is_one_of_both_families_and_free(task: dict[str, Any], tmp_path: Path) -> None:
    """For servers elsewhere; for those of this machine it is of loopback alone."""
    (tmp_path / "config.json").write_bytes(b"{}")
    remote = with_keys(task, {"online_dataserver_ips": "::1", "save": "s", "checkpoint_factor": 1})
    with closing(WeightServer(NeoXArgs.from_dict({**remote, "weight_server_port": 0}))) as server:
        server.offer(WeightUpdate(str(tmp_path), 0, {"config.json": ""}), num_versions=1)
        for address, host in (("http://127.0.0.1:8000", "127.0.0.1"), ("http://[::1]:8000/v1", "[::1]")):
            url = server.url(0, address)
            assert url.startswith(f"http://{host}:{server.port}/") and fetch(f"{url}/config.json") == b"{}"
        with pytest.raises(ServerError, match="rollout.servers: http://no.such.host.invalid:80: "):
            server.url(0, "http://no.such.host.invalid:80")
        port_in_use = NeoXArgs.from_dict({**remote, "weight_server_port": server.port})
        with pytest.raises(ConfigError, match=f"weight_server_port: {server.port}: Address already in use"):
            WeightServer(port_in_use)


def test_answers_are_asked_for_ahead(task: dict[str, Any], server_process: Server, tmp_path: Path) -> None:
    """With rollout.staleness: by weights of before, with old log-probabilities of the trainer's."""
    keys = {"rollout.staleness": 1, "train_iters": 4, "rollout.temperature": 1.0, "rollout.logprob_bound": 0}
    values = with_server(
        task, server_process, tmp_path / "sync", **keys, save=str(tmp_path / "run"), checkpoint_factor=4
    )
    results = run_ranks(steps_of, 1, values, 4)[0]
    first_difference, *later_differences = [metrics[f"{DIFFERENCE}_max"] for metrics in results.metrics]
    assert first_difference < 1e-4 and min(later_differences) > 1e-4
    run_ranks(full_run, 1, values)
    rows, metrics = lines_of(tmp_path / "run"), lines_of(tmp_path / "run", "metrics")
    assert {(row["generation"], row["weights"]) for row in rows} == {(0, 0), (1, 0), (2, 1), (3, 2)}
    waited = [row["train/time/waiting_share"] for row in metrics if "train/reward" in row]
    assert len(waited) == 4 and all(0.0 < share < 1.0 for share in waited)
    assert not any("train/time/sampling_share" in row for row in metrics)
    assert server_process.get("/health")["weight_version"] == 2, "nothing is asked for behind the end"


def test_servers_write_while_training_goes_on(task: dict[str, Any], tmp_path: Path) -> None:
    """Two generations ahead, by a stand-in: what is asked for when, and of which weights."""
    with standing_in() as server:
        keys = {"rollout.server_api": "sglang", "rollout.staleness": 2, "rollout.logprob_bound": 0, "train_iters": 9}
        values = with_server(task, server, tmp_path, **keys)
        weights = run_ranks(weights_after_waiting, 1, values)[0]
    assert weights == [0, 0, 0, 1, 2]
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["2", "3", "4", "latest"]


def weights_after_waiting(rank: int, world_size: int, values: dict[str, Any]) -> list[int]:
    """For the pool: the weights of five generations by version; the next two are there before their time."""
    with started_run(values) as (training, rollouts):
        batches, versions = iter(rollouts), []
        for number in range(5):
            step = next(batches)
            assert rollouts._generation is not None and rollouts.server_sampler is not None
            versions.append(rollouts._generation.weights)
            assert rollouts._generation.old_logprobs is not None
            ahead = rollouts.server_sampler._pending
            assert sorted(ahead) == [number + 1, number + 2]
            for future in ahead.values():
                future.result(timeout=100)
            training.engine.train_step(step, training.schedule(number))
            training.progress.iteration += 1
    return versions


@pytest.mark.parametrize("layout", with_more(["dp2", "tp2, sp", "pp2", "zero3"], "zero3", product=["tp2, sp", "pp2"]))
def test_every_layout_gives_servers_the_same_weights(
    layout: str, task: dict[str, Any], in_process: StepResults, server_process: Server, tmp_path: Path
) -> None:
    results = run_ranks(steps_of, 2, with_server(task, server_process, tmp_path, **LAYOUTS[layout][1]), STEPS)[0]
    assert results.answers == in_process.answers
    assert results.losses == pytest.approx(in_process.losses, rel=1e-5, abs=1e-6)
    assert all(metrics[f"{DIFFERENCE}_max"] < 1e-4 for metrics in results.metrics)


def test_data_ranks_share_the_servers_out(task: dict[str, Any], tmp_path: Path) -> None:
    with standing_in() as first_server, standing_in() as second_server:
        keys = {**VLLM, "rollout.servers": [first_server.address, second_server.address + "/"]}
        run_ranks(steps_of, 2, with_server(task, first_server, tmp_path, **keys), 1)
        for server in (first_server, second_server):
            paths = [path for path, _ in server.requests]
            assert paths.count("/v1/completions") == 8 and paths.count("/collective_rpc") == 1


def test_a_run_by_a_server_goes_on_bit_for_bit(task: dict[str, Any], server_process: Server, tmp_path: Path) -> None:
    keys = {"train_iters": 4, "checkpoint_factor": 2}
    goes_on_bit_for_bit(with_server(task, server_process, tmp_path / "sync", **keys), tmp_path)


def test_what_is_under_way_ends_with_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        connection = Connection(f"http://127.0.0.1:{deaf.getsockname()[1]}", None, 1000.0, lambda line: None)
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(connection.call, "/v1/models")
            accepted, _ = deaf.accept()
            assert accepted.recv(4) == b"GET "
            connection.close()
            with pytest.raises(ServerError, match="GET /v1/models"):
                future.result(timeout=100)
            accepted.close()


def test_the_token_of_a_server_is_asked_for() -> None:
    with standing_in(token="word") as server:
        assert Connection(server.address, "word", 100.0, print).call("/v1/models")["data"][0]["id"] == "toy"
        with pytest.raises(ServerError, match="401: a token is needed.*NEOX_SERVE_TOKEN"):
            Connection(server.address, None, 100.0, print).call("/v1/models")
