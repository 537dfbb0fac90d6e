"""The build of torch by Python, platform and driver: a table, and the command that says it."""

import re
import subprocess
import sys
from itertools import product

import pytest

from megatron.launch.torch_builds import PLATFORMS, RELEASES, TESTED, NoBuild, choose, own_index
from tests.launch.runs import ROOT

COMMAND = ROOT / "megatron/launch/torch_builds.py"
X86, ARM, MAC = PLATFORMS
CPU, CU126, CU128, CU130 = (f"https://download.pytorch.org/whl/{build}" for build in ("cpu", "cu126", "cu128", "cu130"))


@pytest.mark.parametrize(("python", "platform", "driver", "torch_version", "pin", "index", "cuda", "was_tested"), [
    ((3, 11), X86, None, None, "torch==2.13.0", CPU, None, True),
    ((3, 12), ARM, None, "2.11.0", "torch==2.11.0", CPU, None, False),
    ((3, 12), MAC, None, None, "torch==2.13.0", CPU, None, False),
    ((3, 12), MAC, (13, 0), None, "torch==2.13.0", CPU, None, False),
    # a driver of CUDA 13 runs what Python's own index has
    ((3, 12), X86, (13, 0), "2.11.0", "torch==2.11.0", CU130, "13.0", True),
    ((3, 12), ARM, (13, 0), None, "torch==2.13.0", CU130, "13.0", False),
    ((3, 13), X86, (13, 2), None, "torch==2.13.0", CU130, "13.0", False),
    # one of CUDA 12 does not: the build must be named
    ((3, 12), ARM, (12, 7), None, "torch==2.11.0+cu126", CU126, "12.6", False),
    ((3, 12), ARM, (12, 6), "2.13.0", "torch==2.13.0+cu126", CU126, "12.6", False),
    ((3, 11), X86, (12, 2), None, "torch==2.11.0+cu126", CU126, "12.6", False),
    ((3, 12), X86, (12, 8), None, "torch==2.11.0+cu128", CU128, "12.8", False),
    ((3, 12), X86, (12, 9), "2.13.0", "torch==2.13.0+cu126", CU126, "12.6", False),
    ((3, 12), X86, (13, 0), "2.12.1", "torch==2.12.1", CU130, "13.0", False),
])  # fmt: skip
def test_the_build_of_a_machine(python, platform, driver, torch_version, pin, index, cuda, was_tested):
    build = choose(python, platform, driver, torch_version)
    assert (build.pin, build.index, build.cuda, build.is_tested) == (pin, index, cuda, was_tested)


@pytest.mark.parametrize(("driver", "torch_version", "devices", "chosen"), [
    ((12, 8), None, [(10, 0)], "torch==2.11.0+cu128"),  # B200
    ((13, 0), None, [(10, 3), (9, 0)], "torch==2.13.0"),  # B300 beside H100
    ((13, 0), "2.11.0", [(7, 0)], "torch==2.11.0+cu126"),  # V100: later builds have left it
    ((12, 8), None, [(7, 0)], "torch==2.11.0+cu126"),
    ((13, 0), None, [(7, 0)], "torch==2.13.0+cu126"),
    ((12, 8), None, [(6, 1)], "torch==2.11.0+cu126"),
    ((12, 7), None, [(10, 0)], "10.0 12.7 2.11.0"),
    ((12, 8), "2.13.0", [(10, 0)], "10.0 12.8 2.13.0 2.11.0"),
    ((12, 8), None, [(3, 7)], "3.7 12.8"),
])  # fmt: skip
def test_the_build_has_code_for_each_gpu(driver, torch_version, devices, chosen):
    if chosen.startswith("torch=="):
        assert choose((3, 12), X86, driver, torch_version, devices).pin == chosen
        return
    with pytest.raises(NoBuild) as refused:
        choose((3, 12), X86, driver, torch_version, devices)
    assert all(word in str(refused.value) for word in chosen.split())


@pytest.mark.parametrize(("python", "platform", "driver", "torch_version", "message"), [
    ((3, 11), X86, (11, 8), None, "CUDA 11.8.* 12 "),
    ((3, 10), X86, None, None, r"torch 2.13.0 .*Python 3.10; .* 3.11 to 3.15"),
    ((3, 15), X86, None, "2.11.0", r"torch 2.11.0 .*Python 3.15; .* 3.11 to 3.14"),
    ((3, 11), "linux-ppc64le", None, None, "linux-ppc64le.* linux-x86_64"),
    ((3, 11), X86, None, "2.10.0", "torch 2.10.0 .*2.11.* 2.11.0 or 2.13.0"),
    ((3, 11), X86, None, "nightly", "torch nightly"),
])  # fmt: skip
def test_what_nothing_fits_is_refused(python, platform, driver, torch_version, message):
    with pytest.raises(NoBuild, match=message):
        choose(python, platform, driver, torch_version)


def test_every_machine_of_the_documents_table_gets_what_it_says():
    """docs/install.md lists every combination; what nobody tried is marked there as here."""
    text = (ROOT / "docs/install.md").read_text()
    rows = re.findall(r"^\| (CUDA 1[\d.]+|none) \| `(.+?)` \| (\w+) \| (.+?) \|$", text, re.MULTILINE)
    assert len(rows) == 7
    drivers = {"none": None, "CUDA 12": (12, 6), "CUDA 12.8": (12, 8), "CUDA 13": (13, 0)}
    for driver, pin, build, tested_on in rows:
        torch = pin.removeprefix("torch==").partition("+")[0]
        for python, platform in product(((3, 11), (3, 12), (3, 13)), (X86, ARM)):
            chosen = choose(python, platform, drivers[driver], torch)
            assert (chosen.pin, chosen.index.rpartition("/")[2]) == (pin, build)
            machine = f"Python {python[0]}.{python[1]} on {platform.removeprefix('linux-')}"
            assert chosen.is_tested == (machine in tested_on), (pin, machine)


def test_tried_releases_and_an_index_of_ones_own():
    assert {release for release, *_ in TESTED} == set(RELEASES)
    assert f"torch=={RELEASES[-1]}" in (ROOT / "constraints.txt").read_text().splitlines()
    any_build, driver_build = choose((3, 11), X86, None), choose((3, 11), X86, (12, 6))
    assert any_build.words(own_index=True) == ["torch==2.13.0"]
    assert any_build.words() == ["torch==2.13.0", "--extra-index-url", CPU]
    assert (
        driver_build.words(own_index=True)
        == driver_build.words()
        == ["torch==2.11.0+cu126", "--extra-index-url", CU126]
    )
    assert own_index("global.index-url='https://a'\n", {}) and own_index(":env:.find-links='/wheels'", {})
    assert own_index("", {"UV_INDEX": "https://a"})
    assert not own_index("global.cert='/etc/a'\n:env:.default-timeout='9'", {"UV_INDEX": ""})


def ask(*words, **variables):
    command = [sys.executable, "-I", str(COMMAND), "--pip", "/bin/false", *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def test_the_command_needs_only_the_standard_library():
    done = ask("--cuda", "12.7")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"torch==2.11.0+cu126 --extra-index-url {CU126}\n"
    assert "CUDA 12.7" in done.stderr and "not tested" in done.stderr
    assert ask("--cpu", "--torch", "2.13.0").stdout == f"torch==2.13.0 --extra-index-url {CPU}\n"
    loaded = f"import runpy, sys; sys.argv=['x','--cpu']; runpy.run_path({str(COMMAND)!r}, run_name='__main__')"
    command = [sys.executable, "-S", "-c", f"{loaded}; print(sorted(sys.modules))"]  # without site-packages
    assert "torch==2.13.0" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for words, message in ((("--cuda", "12"), "--cuda 12: "), (("--cuda", "11.8"), "CUDA 11.8")):
        done = ask(*words)
        assert (
            done.returncode and not done.stdout and message in done.stderr and "torch_builds.py: error: " in done.stderr
        )
