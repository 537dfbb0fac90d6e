"""Checkpoints in a bucket: runs, damage, kills and tools against a local S3 server."""

import json
import os
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from megatron.checkpointing import CheckpointError, verify
from megatron.checkpointing.object_store import ObjectStore, fetch_checkpoint
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training import train
from tests.pool import run_ranks
from tests.training.runs import ADAMW, NEOX, begin, bit_equal, config, run_to_end
from tools.ckpts import average, convert_hf_to_neox, convert_neox_to_hf, inspect_checkpoints, reshard
from tools.ckpts import verify as verify_tool

TP2 = {"model_parallel_size": 2}
Saved = tuple[Path, list[Any]]  # a run of four steps in a folder, two checkpoints; what its ranks end with


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """Environment of clients of an S3 server of this machine."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    server.stop()


class Bucket:
    """A bucket of a test, seen by a client that is not ours."""

    def __init__(self) -> None:
        self.name = f"runs-{uuid.uuid4().hex[:8]}"
        self.url = f"s3://{self.name}/a/run"
        self.client = boto3.client("s3")
        self.client.create_bucket(Bucket=self.name)

    def keys(self) -> list[str]:
        entries = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [entry["Key"].removeprefix("a/run/") for entry in entries]

    def tags(self) -> set[str]:
        return {key.split("/")[0] for key in self.keys() if "/" in key}

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=f"a/run/{key}")["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"a/run/{key}", Body=data)


@pytest.fixture
def bucket(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return Bucket()


def values(save: str | Path, staging: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 4, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 2}
    remote = {"remote_staging": str(staging), "remote_patience": 0, "log_dir": str(staging / "logs")}
    return config(NEOX, ADAMW, TP2, small, remote, *parts, {"save": str(save), **overrides})


def run(values: dict[str, Any], server: dict[str, str], fn: Any = run_to_end, *args: Any) -> list[Any]:
    return run_ranks(fn, 2, values, *args, env=server)


@pytest.fixture(scope="module")
def saved(server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return folder / "run", run(values(folder / "run", folder), server)


def disturbed_while_sending(rank: int, world_size: int, values: dict[str, Any], killed: bool) -> int:
    """For the pool: while step 4 is sent, rank 0 is killed or rank 1 loses its network. How far it came."""
    training, upload, closed_port = begin(values), ObjectStore.upload, socket.socket()
    closed_port.bind(("127.0.0.1", 0))  # and does not listen

    def disturbed(self: ObjectStore, file: Path, name: str) -> None:
        if killed and rank == 0 and name.startswith("global_step4/optim"):
            os.kill(os.getpid(), signal.SIGKILL)
        if not killed and rank == 1 and "global_step2/" not in name:
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{closed_port.getsockname()[1]}"
            self = ObjectStore(self.url)
        upload(self, file, name)

    ObjectStore.upload = disturbed  # type: ignore[method-assign] # this process is the pool's throw-away fork
    with pytest.raises(CheckpointError, match="earlier ones are untouched") as problem:
        train(training)
    assert values["save"] in str(problem.value)
    return training.progress.iteration


@pytest.mark.more
def test_a_run_in_a_bucket(bucket: Bucket, saved: Saved, server: dict[str, str], tmp_path: Path) -> None:
    """Killed while it sends: a machine that has nothing goes on from what was whole, bit for bit as with a
    folder. Files are the same, older ones are deleted, nothing large stays here."""
    keep_keys = {"keep_last_n_checkpoints": 1, "ephemeral_save_interval": 3, "save_hf": 0}
    with pytest.raises(AssertionError, match="signal 9"):
        run(values(bucket.url, tmp_path / "one", async_save=False), server, disturbed_while_sending, True)
    assert bucket.tags() == {"global_step2", "global_step4"} and bucket.get("latest") == b"global_step2"
    assert ".unfinished_global_step4" in bucket.keys()
    assert ObjectStore(bucket.url).finished_names() == {"global_step2", "latest"}
    assert not [path for path in (tmp_path / "one" / "s3").rglob("*.pt") if "global_step2" in path.parts]
    with pytest.raises(CheckpointError, match="global_step4: .*not finished"):
        fetch_checkpoint(ObjectStore(bucket.url), "global_step4", tmp_path / "x")

    local_save, full_weights = saved
    went_on = run(values(bucket.url, tmp_path / "two", keep_keys), server)
    assert all(bit_equal(a[1], b[1]) for a, b in zip(full_weights, went_on, strict=True))
    assert bucket.tags() == {"global_step4", "huggingface"} and bucket.get("latest") == b"global_step4"
    names = {str(path.relative_to(local_save)) for path in local_save.glob("global_step4/**/*") if path.is_file()}
    keys = set(bucket.keys())
    assert {key for key in keys if not key.startswith("huggingface/")} == names | {"latest"}
    assert {"huggingface/global_step4/config.json", "huggingface/global_step4/model.safetensors"} < keys
    assert [path.name for path in (tmp_path / "two" / "s3").rglob("*.pt")] == []
    fetch_checkpoint(ObjectStore(bucket.url), "global_step4", tmp_path / "global_step4")
    assert verify(tmp_path / "global_step4") is not None


@pytest.mark.more
def test_a_lost_network_is_told_at_the_next_step(bucket: Bucket, server: dict[str, str], tmp_path: Path) -> None:
    run_values = values(bucket.url, tmp_path, train_iters=4000, checkpoint_factor=4000, extra_save_iters=[2, 4])
    iterations = run(run_values, server, disturbed_while_sending, False)
    assert 4 < iterations[0] < 4000 and iterations[0] == iterations[1]
    assert ObjectStore(bucket.url).finished_names() == {"global_step2", "latest"}
    assert bucket.get("latest") == b"global_step2"


def sent(bucket: Bucket, saved: Path) -> None:
    for path in sorted(saved.rglob("*")):
        if path.is_file() and (path.name == "latest" or path.parent != saved):
            bucket.put(str(path.relative_to(saved)), path.read_bytes())


@pytest.mark.product
def test_a_flipped_byte_is_refused_by_name(
    bucket: Bucket, saved: Saved, server: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sent(bucket, saved[0])
    name = "global_step4/layer_02-model_00-model_states.pt"
    data = bytearray(bucket.get(name))
    data[len(data) // 2] ^= 1
    bucket.put(name, bytes(data))
    refusal = f"{bucket.url}/global_step4: damaged: layer_02-model_00-model_states.pt (checksum)"
    with pytest.raises(AssertionError, match=r"damaged: layer_02-model_00-model_states.pt \(checksum\)"):
        run(values(bucket.url, tmp_path), server)
    with pytest.raises(SystemExit, match="1"):
        verify_tool.main([bucket.url])
    out, err = capfd.readouterr()
    assert refusal in err and f"{bucket.url}/global_step2: whole: iteration 2" in out
    assert bit_equal(run(values(bucket.url, tmp_path / "2", load_fallback=True), server)[0][1], saved[1][0][1])
    fetch_checkpoint(ObjectStore(bucket.url), "global_step4", tmp_path / "global_step4")


@pytest.mark.product
def test_tools(bucket: Bucket, saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent(bucket, saved[0])
    reshard.main(["--input_dir", bucket.url, "--output_dir", f"{bucket.url}/resharded", "--tp", "1"])
    assert bucket.get("resharded/latest") == b"global_step4"
    with pytest.raises(SystemExit, match="already exists"):
        reshard.main(["--input_dir", bucket.url, "--output_dir", f"{bucket.url}/resharded", "--tp", "1"])
    convert_neox_to_hf.main(["--input_dir", f"{bucket.url}/resharded/global_step4", "--output_dir", f"{bucket.url}/hf"])
    assert json.loads(bucket.get("hf/config.json"))["model_type"] == "gpt_neox"
    assert ".unfinished_hf" not in bucket.keys()
    convert_hf_to_neox.main(["--hf-model", f"{bucket.url}/hf", "--output-dir", str(tmp_path / "back")])
    average.main([f"{bucket.url}/global_step2", f"{bucket.url}/global_step4", "--output_dir", f"{bucket.url}/mean"])
    capsys.readouterr()
    inspect_checkpoints.main([f"{bucket.url}/mean"])
    assert "optimizer state: no" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        verify_tool.main([f"{bucket.url}/mean", f"{bucket.url}/resharded/global_step4"])


def test_what_cannot_be_reached(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"s3x://bucket/run": "s3x://.* s3://", "s3://": "s3://BUCKET/FOLDER", "hf://a/b": "hf://.* Hub"}
    for place, message in places.items():
        with pytest.raises(ConfigError, match=message):
            NeoXArgs.from_dict(values(place, Path("x")))
    with pytest.raises(CheckpointError, match="bucket elsewhere"):
        ObjectStore("s3://elsewhere/run").check_writable()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
    with pytest.raises(CheckpointError, match=r"pip install 'neox\[remote\]'"):
        ObjectStore(bucket.url)


def test_the_same_step_again(bucket: Bucket, tmp_path: Path) -> None:
    """`latest` names the one before until the new one is whole; in a bucket and any fsspec store."""
    for url in (bucket.url, f"file://{tmp_path / 'store'}"):
        store = ObjectStore(url)
        for tag in ("global_step2", "global_step10"):
            store.begin(tag)
            store.write(f"{tag}/old", b"1")
            store.finish(tag)
            store.write("latest", tag.encode())
        store.begin("global_step10")
        assert store.finished_names() == {"global_step2", "latest"} and store.read("latest") == b"global_step2"
        store.begin("global_step12")  # after a kill
        assert store.sizes() == {"latest": 12, "global_step2/old": 1, ".unfinished_global_step12": 0}
    shutil.rmtree(tmp_path / "store")
