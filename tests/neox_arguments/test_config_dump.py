"""`--print-config`, the dump at the start of a run, and the generated documentation."""

import re

import pytest

from megatron.neox_arguments import NeoXArgs, arguments_dump, load
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.reports.config_dump import diff_config, print_config
from tests.neox_arguments.conftest import ROOT
from tests.neox_arguments.conftest import TEXT as MODEL
from tools.docs import config_reference

TEXT = f"""{MODEL}\
prompt_end: "\\n\\n"
attention_config: [[[flash], 2]]
optimizer: {{type: Adam, params: {{lr: 1e-2}}}}
rope_fusion: true
"""


@pytest.fixture
def args(write):
    return load(write(a=TEXT), ["bf16.enabled=true"])


def test_every_value_is_printed_with_its_origin_set_values_first(args):
    text = print_config(args)
    lines = text.splitlines()
    origins = dict(re.findall(r"^([^#\s]+): .*  # (.*)$", text, re.MULTILINE))
    assert origins["num_layers"] == "a.yml:1" and origins["bf16.enabled"] == "--set" and origins["seed"] == "default"
    assert origins["optimizer.params.lr"] == "a.yml:8" and origins["optimizer.params.eps"] == "default"
    assert origins["precision"] == "derived"
    for name, key in keys_of(NeoXArgs).items():
        if name == "config_files":
            continue
        assert name in origins or key.section is not None and any(path.startswith(name + ".") for path in origins), name
    order = [origins[line.split(":")[0]] == "default" for line in lines if not line.startswith("#")]
    assert order == sorted(order)
    assert lines[-1].startswith("# note: no effect here: rope_fusion (")


def test_what_a_run_would_refuse_is_marked_and_told(write):
    text = print_config(load(write(a=TEXT + "use_mup: true\nfp16: {enabled: false}\namp: {enabled: true}\n")))
    assert re.search(r"^use_mup: +true +# a.yml:10 \(REFUSED by a run, see below\)$", text, re.MULTILINE)
    last = text.splitlines()[-2:]
    assert {line.split(":")[0] for line in last} == {"# a run refuses use_mup", "# a run refuses amp"}
    assert "MuP" in text and "bf16: {enabled: true}" in text


def test_what_differs_between_two_runs(write):
    changed_text = TEXT.replace("1e-2", "2e-2").replace("hidden_size: 64", "hidden_size: 128") + "seed: 5\n"
    base_file, changed_file = write(a=TEXT, b=changed_text)
    assert diff_config(load([base_file]), load([changed_file])).splitlines() == [
        "hidden_size: 64 (a.yml:2) -> 128 (b.yml:2)", "head_dim: 16 (derived) -> 32 (derived)",
        "optimizer.params.lr: 0.01 (a.yml:8) -> 0.02 (b.yml:8)", "seed: 1234 (default) -> 5 (b.yml:10)",
        "lr: 0.01 (derived) -> 0.02 (derived)",
    ]  # fmt: skip
    assert diff_config(load([base_file]), load([base_file])) == ""


def test_what_is_printed_is_a_configuration(args, tmp_path):
    (tmp_path / "printed.yml").write_text(print_config(args))
    reloaded = load([tmp_path / "printed.yml"])
    for name in set(keys_of(NeoXArgs)) - {"config_files"}:
        assert getattr(reloaded, name) == getattr(args, name), name


def test_the_dump_is_that_of_neox(args):
    lines = arguments_dump(args).splitlines()
    assert lines[0] == "-------------------- arguments --------------------"
    assert lines[-1] == "---------------- end of arguments ----------------"
    assert "  num_layers ...................... 2...........................updated" in lines
    assert "  seed ............................ 1234........................default" in lines
    marks = [line[-7:] for line in lines[1:-1]]
    assert marks == sorted(marks, reverse=True) and set(marks) == {"updated", "default"}
    assert len(lines) == 2 + len(keys_of(NeoXArgs)) - 1, "all but config_files"


def test_the_reference_is_up_to_date_and_its_check_can_fail(tmp_path, monkeypatch):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["config_reference.py", *words])
        return config_reference.main()

    assert run("--check") == 0
    output_options = ("--output", str(tmp_path))
    assert run("--check", *output_options) == 1
    assert run(*output_options) == run("--check", *output_options) == 0
    for name in ("configuration.md", "configuration.schema.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "x")
        assert run("--check", *output_options) == 1
        (tmp_path / name).write_text(text)


def test_every_key_is_documented_and_none_is_spelt_like_a_failure():
    """Logs are searched for the word `error`."""
    text, keys = (ROOT / "docs/configuration.md").read_text(), keys_of(NeoXArgs).values()
    assert [key.name for key in keys if f"| `{key.name}` |" not in text] == []
    assert not [key.name for key in keys if "error" in key.name.lower()]
    assert not [key.name for key in keys if any("error" in str(choice).lower() for choice in key.choices)]
