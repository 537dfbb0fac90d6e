"""`make gpu` with parts that need no GPU and no torch: `python -m tests.benchmarks.stub_parts FOLDER`."""

import os
import sys
from pathlib import Path
from unittest import mock

from benchmarks import gpu
from benchmarks.gpu_run.parts import FACTS, OUTCOMES, RESULT, Part

FACTS_FOUND = (
    "{'device': 'NVIDIA Stub', 'torch': '2.11.0+cu130', 'python': '3.12.3', 'driver': '580.1', 'nccl': '2.28.9',"
    " 'cores': 8, 'packages': {'deepspeed': '0.19.8', 'transformers': None, 'trl': None},"
    " 'product_flops': {'bf16': 764e12}, 'copy_bytes_per_second': 4.2e12}"
)
STEP = (
    "{'ceiling_flops': 764e12, 'rows': [{'name': 'x', 'seconds': SECONDS, 'tokens': 1 / SECONDS, 'model_flops': 4e14,"
    " 'neox_flops': 5e14, 'of_ceiling': 0.52, 'beside_bare': None, 'peak_bytes': 31 * 10**9}]}"
)
# The second takes its process down, as an error of CUDA can; the third must run all the same.
TESTS = """\
import os
import pytest
def test_before(): pass
def test_takes_it_down(): os.abort()
def test_after(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip("no use here")
def test_skipped(): pass
"""


# As a part of tests that has got as far as its second test.
SECOND_TEST = (
    "import json, os, time; open('{folder}/pid', 'w').write(str(os.getpid())); "
    "rows = [{'name': 'a', 'begun': True}, {'name': 'a', 'outcome': 'passed'}, {'name': 'b', 'begun': True}]; "
    f"open('{{folder}}/{OUTCOMES}', 'w').write(''.join(json.dumps(row) + chr(10) for row in rows)); time.sleep(60)"
)


def writes(rows: str) -> tuple[str, ...]:
    return "-c", f"import json; open('{{folder}}/{RESULT}', 'w').write(json.dumps({rows}))"


def code(text: str, **options: object) -> Part:
    name = str(options.pop("name"))
    return Part(name, "a stub", ("-c", text), **{"typical_s": 0.0, "limit_s": 20.0, **options})  # type: ignore[arg-type]


def parts(folder: Path) -> list[Part]:
    (folder / "test_stub.py").write_text(TESTS)
    pytest = ("-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "tests.gpu.outcomes")
    sleeps = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    slow = "-c", f"{writes(STEP.replace('SECONDS', '0.3'))[1]}; {sleeps}"
    return [
        Part(FACTS, "a stub", writes(FACTS_FOUND), 0, 20),
        Part("tests", "tests of a stub", (*pytest, "--outcomes", "{folder}/" + OUTCOMES, str(folder / "test_stub.py")),
             0, 30, tests=True),
        code("import os; os.abort()", name="crash"),
        code("raise MemoryError('17 GB asked')", name="memory"),
        code("pass", name="empty"),
        Part("slow", "a stub", slow, 0, float(os.environ.get("SLOW_LIMIT_S", "3"))),
        code("pass", name="rival", packages=("a_package_that_is_not",)),
        code("pass", name="long", typical_s=9999.0),
        code(SECOND_TEST, name="left", tests=True, limit_s=60.0),
        code(SECOND_TEST, name="right", tests=True, limit_s=60.0),
        Part("bare", "a step", writes(STEP.replace("SECONDS", "0.5")), 0, 20),
        Part("engine", "a step", writes(STEP.replace("SECONDS", "0.4")), 0, 20, baseline="bare"),
    ]  # fmt: skip


def main() -> int:
    folder = Path(sys.argv[1])
    places = mock.patch.multiple(gpu, parts=lambda: parts(folder), WORK=folder / "work", TABLES=folder / "tables")
    with places:
        return gpu.main(["--output", str(folder / "table.json"), *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
