"""The code has all that docs/development.md and CONTRIBUTING.md name: files, names, commands, the map."""

import re
from pathlib import Path

import pytest

from tests.guide.page import PAGE, ROOT, defined, links
from tests.pool import run_ranks

PAGES = (PAGE, ROOT / "CONTRIBUTING.md")


def wrong(page: Path, label: str, target: str) -> str | None:
    """Returns the fault of a link; a link whose text is a name in code leads to the file that defines it."""
    path = (page.parent / target).resolve()
    if not path.exists():
        return f"{target} is not there"
    name = re.fullmatch(r"`([A-Za-z_][\w.]*)`", label)
    if path.suffix == ".py" and name and not name[1].endswith(".py") and name[1] not in defined(path):
        return f"{target} defines no {name[1]}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_what_they_name(page: Path) -> None:
    page_links = links(page.read_text(encoding="utf-8"))
    assert page_links and not [problem for link in page_links if (problem := wrong(page, *link))]


def test_headings_and_targets_of_make_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        make_targets = set(re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8")))
        assert make_targets <= targets, f"{page.name}: {make_targets - targets}"


def test_the_test_on_the_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of a distributed test is a module of its own, as the page gives it."""
    text = PAGE.read_text(encoding="utf-8").split("`tests/mpu/test_my_sum.py`:\n\n```python\n")[1].split("```")[0]
    (tmp_path / "test_my_sum.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import test_my_sum  # type: ignore[import-not-found]

    test_my_sum.test_the_sum_is_the_same_on_every_rank()
    with pytest.raises(AssertionError, match="never"):
        run_ranks(test_my_sum.fails_on_one, 2)
