"""The site of the documentation: it builds, and each link and anchor has its target."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(pages: Path, folder: Path) -> tuple[int, str]:
    """Exit status and output of a build in which a warning is an error."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(pages), str(folder)]
    process = subprocess.run(command, capture_output=True, text=True)
    return process.returncode, process.stdout + process.stderr


@pytest.mark.more
def test_every_page_is_built_and_has_a_place_in_the_navigation(tmp_path: Path) -> None:
    status, output = build(ROOT / "docs", tmp_path)
    assert status == 0, output
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert [page for page in pages if f'href="{page}.html"' not in index and page != "index"] == []


@pytest.mark.parametrize(("links", "missing"), [
    (["[a](two.md#a-part)", "[b](../README.md)"], []),
    (["[a](gone.md)", "[a](two.md#gone)", "[a](../gone.py)"], ["gone.md", "two.md#gone", "../gone.py"]),
])  # fmt: skip
def test_a_link_without_a_target_fails(links: list[str], missing: list[str], tmp_path: Path) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    shutil.copyfile(ROOT / "docs" / "conf.py", pages / "conf.py")
    (tmp_path / "README.md").write_text("# Start\n")
    (pages / "index.md").write_text("\n```{toctree}\none\ntwo\n```\n")
    (pages / "two.md").write_text("# Two\n\n## A part\n")
    (pages / "one.md").write_text("# One\n\n" + "\n\n".join(links))
    status, output = build(pages, tmp_path / "site")
    assert (status != 0) == bool(missing), output
    warnings = [line for line in output.splitlines() if "WARNING" in line]
    assert len(warnings) == len(missing), output
    assert all(any(link.rpartition("/")[2].rpartition("#")[2] in line for line in warnings) for link in missing), output


def test_a_link_to_a_file_becomes_its_name() -> None:
    changed = runpy.run_path(str(ROOT / "docs" / "conf.py"))["for_the_site"]
    page = (
        "[the loop](../train.py), [`train.py`](../train.py), [a](data.md#x), [b](../README.md)\n"
        "```\n[a](../train.py)\n```"
    )
    expected = "the loop (`train.py`), `train.py`, [a](data.md#x), [b](index.md)\n```\n[a](../train.py)\n```"
    assert changed(page, ROOT / "docs") == expected
