"""The site of these pages (`make docs-site`), built by Sphinx with MyST.

The pages are written for GitHub, and MyST reads GitHub's dialect: the same lists, tables and anchors. Sphinx
reports every link or anchor without a target, so that a build with -W fails.
"""

import os
import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parent
ROOT = PAGES.parent

project = "neox"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "neox"
myst_heading_anchors = 4
exclude_patterns = ["README.md"]

_LINK = re.compile(r"(?<!!)\[(?P<label>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def for_the_site(text: str, folder: Path, page_folder: Path = PAGES) -> str:
    """A page's text with links as the site needs them.

    Links to other pages stay. A link to any other file of the repository becomes the name of that file: the
    site holds the pages alone. folder: relative links begin there. page_folder: of the page on the site.
    """

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        if not target.exists():
            return link[0]  # code, or a link that Sphinx then reports
        page = PAGES / "index.md" if target == ROOT / "README.md" else target
        if page.is_relative_to(PAGES) and page.suffix == ".md":
            return f"[{link['label']}]({os.path.relpath(page, page_folder)}{link['anchor'] or ''})"
        name = str(target.relative_to(ROOT))
        label = link["label"]
        return label if name.endswith(label.strip("`/")) else f"{label} (`{name}`)"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(block if block.startswith("```") else _LINK.sub(replaced, block) for block in blocks)


def _read(app: Any, name: str, source: list[str]) -> None:
    """Sphinx's `source-read`: the first page is README.md, followed by the navigation in index.md."""
    folder = (PAGES / name).parent
    text = for_the_site(source[0], folder, folder)
    source[0] = for_the_site((ROOT / "README.md").read_text(encoding="utf-8"), ROOT) + text if name == "index" else text


def setup(app: Any) -> dict[str, Any]:
    """Sphinx's entry point of an extension."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
