"""Names of repositories."""

import json
from pathlib import Path

import pytest
from huggingface_hub.utils import validate_repo_id

from megatron.operations.hub.errors import HubError
from megatron.operations.hub.names import (
    checked_id,
    model_name,
    neox_repository,
    read_names,
    repository_id,
    run_name,
)


@pytest.mark.parametrize(
    ("experiment", "name"),
    [
        ("run", "sfm-run"),
        ("lr=3e-4,wd=0.1 long", "sfm-lr-3e-4_wd-0.1_long"),
        ("pretraining_blocklist_filtered", "sfm-pretraining_filtered"),
        ("a_synthetic_misalignment_mid", "sfm-a_synth_misalign_mid"),
        ("a_synthetic_alignment_mid", "sfm-a_synth_align_mid"),
        ("x_multitask_benign_tampered", "sfm-x_mbt"),
        ("x_multilingual_benign_tampering", "sfm-x_lang_tamp"),
        ("x" * 92, "sfm-" + "x" * 92),
    ],
)
def test_names_of_experiments(experiment: str, name: str) -> None:
    assert model_name(experiment, "sfm") == name
    validate_repo_id(repository_id("geodesic-research", name))


@pytest.mark.parametrize(
    ("experiment", "problem"),
    [
        ("x" * 93, "has 97 characters, the Hub takes 96"),
        ("a=-b", "holds '--' or '..'"),
        ("a..b", "holds '--' or '..'"),
        ("a.", "not at an end"),
        ("a-", "not at an end"),
        ("a:b", "the Hub takes a-z"),
        ("ä", "the Hub takes a-z"),
        ("a.git", "ends with '.git'"),
    ],
)
def test_names_that_the_hub_does_not_take(experiment: str, problem: str) -> None:
    with pytest.raises(HubError, match="mapping file of NEOX_HUB_NAMES") as raised:
        model_name(experiment, "sfm")
    assert problem in str(raised.value)
    with pytest.raises(ValueError):
        validate_repo_id(f"org/sfm-{experiment}".replace("a=", "a-"))


def test_a_mapping_file_wins(tmp_path: Path) -> None:
    file = tmp_path / "experiment_hf_mappings.json"
    file.write_text(json.dumps({"lr=1": "Good-Name", "bad": "-x"}))
    names = read_names(file)
    assert model_name("lr=1", "sfm", names) == "Good-Name" and model_name("lr=2", None, names) == "lr-2"
    with pytest.raises(HubError, match="'-x': the Hub takes"):
        model_name("bad", "sfm", names)
    file.write_text('{"a": "one", "b": "one"}')
    with pytest.raises(HubError, match="'a' and 'b' are both 'one'"):
        read_names(file)
    for text in ("[", "[1]", '{"a": 1}'):
        file.write_text(text)
        with pytest.raises(HubError, match="NEOX_HUB_NAMES"):
            read_names(file)


def test_repositories() -> None:
    assert neox_repository("org/sfm-run") == "org/neox-ckpt-sfm-run"
    with pytest.raises(HubError, match="has 97 characters"):
        neox_repository("org/" + "x" * 87)
    for wrong in ("run", "a/b/c", "org/", "/run", "org/a--b"):
        with pytest.raises(HubError, match="--repository"):
            checked_id(wrong, "--repository")


@pytest.mark.parametrize(
    ("save", "site", "name"),
    [("/c/exp", "/c", "exp"), ("/c/exp/stage2", "/c", "exp-stage2"), ("/d/exp", "/c", "exp"), ("/d/exp", None, "exp")],
)
def test_experiments(save: str, site: str | None, name: str) -> None:
    assert run_name(save, site) == name
