"""`deepy.py doctor` on what is elsewhere: models on the Hub, and the files that a configuration names."""

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from megatron.launch.doctor import main
from megatron.launch.doctor.config import checkpoint_bytes, data_checks, load_check, read_config, tokenizer_check
from megatron.launch.doctor.hub import model_check
from megatron.neox_arguments import NeoXArgs, load
from tests.launch.runs import serving

SECRET = "hf_do_not_show_this"
ANSWERS = {  # model: status and code without a token, with the right one
    "org/open": ((200, ""), (200, "")), "org/large": ((302, ""), (302, "")), "org/down": ((503, ""), (503, "")),
    "org/gated": ((401, "GatedRepo"), (403, "GatedRepo")), "org/private": ((401, "RepoNotFound"), (200, "")),
    "org/missing": ((401, "RepoNotFound"), (404, "RepoNotFound")),
    "org/data": ((404, "EntryNotFound"), (404, "EntryNotFound")),
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, by status and X-Error-Code."""

    def do_HEAD(self) -> None:
        if self.path == "/elsewhere":
            self.server.leaked.append(self.headers.get("authorization"))
        model, _, revision_path = self.path.strip("/").partition("/resolve/")
        status, code = ANSWERS[model][self.headers.get("authorization") == f"Bearer {SECRET}"]
        assert revision_path == "main/config.json"
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()


@pytest.fixture
def hub(tmp_path) -> Iterator[dict[str, str]]:
    with serving(Hub) as server:
        server.leaked = []
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    assert not server.leaked


@pytest.mark.parametrize(("model", "token", "state", "message"), [
    ("org/open", None, "ok", "no token"),
    ("hf://org/large", "HF_TOKEN", "ok", "HF_TOKEN"),
    ("org/private", "HF_TOKEN", "ok", "HF_TOKEN"),
    ("org/private", "file", "ok", "FOLDER/token"),
    ("org/private", None, "failed", r"no such model \(401\).*no token"),
    ("org/gated", "HF_TOKEN", "failed", r"access .*\(403\).*HF_TOKEN"),
    ("org/gated", None, "failed", r"access .*\(401\).*no token"),
    ("org/missing", "HF_TOKEN", "failed", r"no such model \(404\)"),
    ("org/data", None, "failed", "no config.json"),
    ("org/down", None, "failed", "503"),
])  # fmt: skip
def test_models_on_the_hub(hub, tmp_path, model, token, state, message):
    if token == "file":
        (tmp_path / "token").write_text(SECRET + "\n")
    check = model_check(model, hub | ({"HF_TOKEN": SECRET} if token == "HF_TOKEN" else {}))
    assert check.state == state and re.search(message.replace("FOLDER", str(tmp_path)), check.found), check
    assert SECRET not in str(check)


def test_models_without_a_network_and_in_folders(tmp_path):
    env = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "cannot be reached" in model_check("org/open", env).found
    assert "HF_HUB_OFFLINE is set" in model_check("org/open", env | {"HF_HUB_OFFLINE": "1"}).found
    snapshot = tmp_path / "hub/models--org--open/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert model_check("org/open", env).state == "warning"
    assert model_check("org/open", env | {"HF_HUB_OFFLINE": "1"}).state == "ok"
    assert "is not a folder" in model_check(f"{tmp_path}/none", {}).found
    assert "config.json" in model_check(str(tmp_path), {}).found
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "no weights" in model_check(str(tmp_path), {}).found
    (tmp_path / "model.safetensors").touch()
    assert model_check(str(tmp_path), {}).found.endswith(": llama")


def test_a_configuration_and_what_it_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keys = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
        "train_iters": 1, "train_micro_batch_size_per_gpu": 1, "vocab_file": "tokenizer.json", "data_path": "text",
        "load": "base", "save": "run", "checkpoint_factor": 1, "tokenizer_type": "HFTokenizer",
    }  # fmt: skip
    text = "".join(f"{key}: {value}\n" for key, value in keys.items())
    (tmp_path / "a.yml").write_text(text)

    def no_tokenizer(args: NeoXArgs) -> None:
        raise OSError(f"{args.vocab_file}: no such file")

    assert main(["a", "--json"], no_tokenizer) == 1
    checks_by_name = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks_by_name["config"]["state"] == "ok"
    facts = {"data": "data_path: text.idx", "tokenizer": "HFTokenizer: tokenizer.json: no such", "save": "run: "}
    assert all(checks_by_name[name]["found"].startswith(fact) for name, fact in facts.items())
    assert checks_by_name["data"]["advice"] == "a.yml:9"
    assert re.search("base .*a.yml:10", checks_by_name["load"]["found"])

    args, _ = read_config(["a.yml"])
    for file in ("text.idx", "text.bin"):
        (tmp_path / file).write_text("x")
    (tmp_path / "base").mkdir()
    (tmp_path / "base/latest").touch()
    checks = [*data_checks(args), load_check(args), tokenizer_check(args, lambda args: None)]
    assert [check.state for check in checks] == ["ok"] * 3
    (tmp_path / "a.yml").write_text(text.replace("train_iters", "train_itres"))
    args, checks = read_config(["a.yml"])
    assert args is None and checks[0].state == "failed"
    assert checks[0].found.startswith("a.yml:6: train_itres")


def test_the_size_of_a_checkpoint():
    """Blocks that all have experts have no dense width, so none is refused."""
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "padded_vocab_size": 96}
    model |= {"max_position_embeddings": 16, "activation": "swiglu", "moe_num_experts": 4, "moe_intermediate_size": 50}
    args = NeoXArgs.from_dict({**model, "mlp_multiple_of": 64})
    blocks = 2 * (4 * 32 * 32 + 4 * 3 * 32 * 50)
    assert checkpoint_bytes(args) == 12 * (blocks + 96 * 32)
    args = load(["configs/1-3B.yml", "configs/local_setup.yml"])
    assert checkpoint_bytes(args) == pytest.approx(14 * 1.42e9, rel=0.03)  # 1.32e9 and the output embedding
