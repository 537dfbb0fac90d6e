"""Site files with mistakes: each is told with file, line and key."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch.kubernetes import Site, read_site
from megatron.launch.kubernetes.site import Claim
from megatron.neox_arguments import ConfigError
from megatron.neox_arguments.keys.declaration import keys_of

FULL_SITE = """\
namespace: training
image: registry/neox:1.0
name: run
replicas: 2
gpus: 8
gpu_resource: amd.com/gpu
cpus: 96
memory: 800Gi
shared_memory: 64Gi
claims:
  models-pvc: {path: /models, size: 2Ti}
  data.pvc: {path: /data}
storage_class: cephfs
variables: {EPOCHS: 2, OUTPUT_DIR: /models/run}
secrets: {HF_TOKEN: hub/token}
restarts: 3
metrics_port: 0
queue: user-queue
labels: {team: a}
annotations: {note: b}
node_selector: {zone: c}
image_pull_secret: registry
"""
MINIMAL_SITE = "namespace: a\nimage: registry/neox:1.0\n"


def write(folder: Path, text: str) -> Path:
    (folder / "site.yml").write_text(text)
    return folder / "site.yml"


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read_site(write(folder, text))
    return str(refused.value)


def test_a_site_with_every_key(tmp_path: Path) -> None:
    site = read_site(write(tmp_path, FULL_SITE))
    assert set(yaml.safe_load(FULL_SITE)) == set(keys_of(Site)), "the example is whole"
    assert (site.world_size, site.memory, site.restarts, site.queue) == (16, "800Gi", 3, "user-queue")
    assert site.volumes() == {"models-pvc": "/models", "data.pvc": "/data"}
    assert site.claims["data.pvc"]["size"] is None
    environment = site.environment()
    assert (environment["EPOCHS"], environment["BATCH_SIZE"], environment["WORLD_SIZE"]) == ("2", "8", "16")
    assert environment["OUTPUT_DIR"] == "/models/run"


def test_what_a_site_need_not_say(tmp_path: Path) -> None:
    site = read_site(write(tmp_path, MINIMAL_SITE))
    assert (site.name, site.replicas, site.gpus, site.cpus, site.memory) == ("neox", 4, 1, 6, "20Gi")
    assert site.volumes() == {"trained-models-pvc": "/shared/models", "workspace-pvc": "/workspace"}
    assert set(site.secrets) == {"HF_TOKEN", "WANDB_API_KEY"}
    assert read_site(write(tmp_path, MINIMAL_SITE + "claims: {}\nsecrets: {}\n")).secrets == {}
    site = read_site(write(tmp_path, MINIMAL_SITE + "variables: {TOKENIZERS_PARALLELISM: false, KEYBOARD: us}\n"))
    assert set(site.variables) == {"TOKENIZERS_PARALLELISM", "KEYBOARD"}


@pytest.mark.parametrize("name", [*keys_of(Site), *keys_of(Claim)])
def test_a_typo_in_any_key_is_told_with_its_line_and_the_right_name(name: str, tmp_path: Path) -> None:
    wrong = name[:-2] + name[-1] + name[-2] if name[-1] != name[-2] else name + name[-1]
    text = re.sub(rf"(^|[ {{]){name}:", rf"\g<1>{wrong}:", FULL_SITE, count=1, flags=re.MULTILINE)
    assert text != FULL_SITE
    line = next(i for i, row in enumerate(text.splitlines(), 1) if f"{wrong}:" in row)
    prefix = "claims.models-pvc." if name in keys_of(Claim) else ""
    message = rf"^{tmp_path}/site.yml:{line}: {prefix}{wrong}: .*\b{name}\b"
    assert re.search(message, refusal(tmp_path, text), re.M)


@pytest.mark.parametrize(("changes", "message"), [
    ({"image": "registry/neox"}, ":2: image: .*release"),
    ({"image": "registry:5000/neox:latest"}, "image: .*release"),
    ({"image": None}, "image: .*required"),
    ({"replicas": 0}, ":3: replicas: .*at least 1.* 0"),
    ({"gpus": "many"}, 'gpus: .*int.*many'),
    ({"name": "My_Run"}, "name: .*45 lower-case"),
    ({"memory": "20 GB"}, 'memory: .*20Gi.*20 GB'),
    ({"claims": {"models": {"size": "1Gi"}}}, "claims.models.path: .*required"),
    ({"claims": {"models": "/models"}}, "claims.models: .*mapping"),
    ({"claims": {"models": {"path": "models"}}}, "claims.models.path: .*absolute"),
    ({"claims": {"my_models": {"path": "/models"}}}, "claims.my_models: .*name"),
    ({"variables": {"RANK": 0}}, "variables.RANK: differs"),
    ({"variables": {"MASTER_ADDR": "a"}}, "variables.MASTER_ADDR: differs"),
    ({"variables": {"PET_NNODES": 4}}, "variables.PET_NNODES: differs"),
    ({"variables": {"WORLD_SIZE": 8}}, "variables.WORLD_SIZE: .*replicas 4 x gpus 1"),
    ({"variables": {"HF_TOKEN": "hf_abc"}}, "variables.HF_TOKEN: .*secret"),
    ({"variables": {"NOTE": "hf_abc" + 20 * "x"}}, "variables.NOTE: .*secret"),
    ({"annotations": {"note": "token hf_abc" + 20 * "x"}}, "annotations.note: .*secret"),
    ({"labels": {"team": "a b"}}, "labels.team: .*63"),
    ({"labels": {"my team": "a"}}, "labels.my team: .*name"),
    ({"queue": "my queue"}, "queue: .*name"),
    ({"gpu_resource": "nvidia gpu"}, "gpu_resource: .*name"),
    ({"claims": {"a": {"path": "/models"}, "b": {"path": "/models"}}}, "claims.b.path: .* claim a;"),
    ({"variables": {"MASTER_PORT": "http"}}, "variables.MASTER_PORT: .*port"),
    ({"secrets": {"HF_TOKEN": "hf_abc"}}, "secrets.HF_TOKEN: .*SECRET/KEY"),
    ({"labels": {"team": True}}, 'labels.team: .*"true"'),
])  # fmt: skip
def test_values_that_cannot_be(changes: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    refusal_text = refusal(tmp_path, yaml.safe_dump({**yaml.safe_load(MINIMAL_SITE), **changes}, sort_keys=False))
    assert refusal_text.count("\n") == 0 and re.search(message, refusal_text)
    assert "hf_abc" not in refusal_text


def test_files_that_are_no_site(tmp_path: Path) -> None:
    assert "`key: value`" in refusal(tmp_path, "- a\n") and "`key: value`" in refusal(tmp_path, "")
    assert "site.yml:2: not valid YAML" in refusal(tmp_path, "a: b\n  c: [\n")
    assert ":3: image: already set at" in refusal(tmp_path, MINIMAL_SITE + "image: b:1\n")
    with pytest.raises(ConfigError, match="absent.yml: no such file"):
        read_site(tmp_path / "absent.yml")
