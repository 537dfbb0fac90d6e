"""tools/datasets/inspect.py: in a terminal, as a page in a browser, and as a file with a dangerous name."""

import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.tokenizer import HFTokenizer
from tests.data.samples import DATASET, TOKENIZER
from tests.marks import with_more
from tests.tools.commands import refused, run_tool
from tools.datasets import inspect_samples

FOLDER = Path(__file__).parents[2] / "tools" / "datasets"
TOOLS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
ORDINARY = {"inspect.py", "convert.py", "preprocess_data_with_chat_template.py"}
CHAT = DATASET / "chat_conversation_document"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
# Reads, in the page, what a reader sees of every span
PROBE = """<script>
const seen = [...document.querySelectorAll(".text")].map(text => [...text.querySelectorAll("span")].map(span => {
  const style = getComputedStyle(span), box = span.getBoundingClientRect();
  return {text: span.textContent, background: style.backgroundColor, colour: style.color, border: style.borderTopStyle,
          shown: box.width > 0 && box.height > 0 && style.visibility == "visible" && style.whiteSpace == "pre-wrap"};
}));
const data = document.createElement("pre"); data.id = "probe"; data.textContent = JSON.stringify(seen);
document.body.append(data);
</script></body>"""


def inspect(*words: object) -> str:
    """Returns its output, in this process; `test_tools_beside_it_start` has the file itself."""
    with redirect_stdout(io.StringIO()) as out:
        run_tool(inspect_samples.main, *words)
    return out.getvalue()


def in_browser(page: Path, folder: Path) -> list[list[dict]]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser (apt-get install chromium): none of {', '.join(BROWSERS)}")
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--dump-dom"]
    done = subprocess.run([browser, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
    probe = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert probe, done.stderr
    return json.loads(probe[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_page_in_a_browser(tmp_path: Path):
    page = tmp_path / "chat.html"
    assert inspect(CHAT, "--vocab-file", TOKENIZER, "--samples", 24, "--html", page) == f"wrote the page: {page}\n"
    content = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)|url\(|https?://|<script', content), "needs nothing else"
    tokenizer, text = HFTokenizer(TOKENIZER), IndexedDataset(CHAT)
    labels = IndexedDataset(f"{DATASET}/chat_conversation_label_document")
    end = tokenizer.special_tokens[tokenizer.eod]
    documents = in_browser(page, tmp_path)
    assert len(documents) == len(text) == 24
    styles: dict[str, set[tuple[str, str]]] = {"trained": set(), "masked": set()}
    for index, document_spans in enumerate(documents):
        ids, trained = text[index], labels[index] >= 0
        green = [span for span in document_spans if span["background"] != "rgba(0, 0, 0, 0)"]
        uncoloured = [span for span in document_spans if span["background"] == "rgba(0, 0, 0, 0)"]
        for spans, mask in ((green, trained), (uncoloured, ~trained)):
            expected = "".join(end if i == tokenizer.eod else tokenizer.detokenize([i]) for i in ids[mask].tolist())
            assert "".join(span["text"] for span in spans) == expected
        assert all(span["shown"] for span in document_spans)
        assert [span["text"] for span in document_spans if span["border"] == "solid"] == [end]
        styles["trained"] |= {(span["background"], span["colour"]) for span in green}
        styles["masked"] |= {(span["background"], span["colour"]) for span in uncoloured}
    assert styles == {
        "trained": {("rgb(211, 242, 220)", "rgb(11, 74, 36)")}, "masked": {("rgba(0, 0, 0, 0)", "rgb(95, 99, 104)")},
    }  # fmt: skip
    assert np.concatenate([labels[i] >= 0 for i in range(24)]).mean() > 0.5


def test_markup_in_the_data_is_text(tmp_path: Path):
    tokenizer, text = HFTokenizer(TOKENIZER), 'a <b onclick="x">& </p></body> <script>document.body.remove()</script>'
    with IndexedDatasetWriter(tmp_path / "x_document", np.uint16) as writer:
        writer.add_document(np.array(tokenizer.tokenize(text), np.uint16))
    inspect(tmp_path / "x_document", "--vocab-file", TOKENIZER, "--html", tmp_path / "x.html")
    ((span,),) = in_browser(tmp_path / "x.html", tmp_path)
    assert span["text"] == text


def test_stats_and_pairs(tmp_path: Path):
    words = ("--stats", "--picture", tmp_path / "l.png", "--html", tmp_path / "p.html", "--samples", 3)
    output = inspect(DATASET / "pairs_chosen_document", "--vocab-file", TOKENIZER, *words)
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "p.html").read_text()
    assert page.count('<div class="group">') == 3 and page.count("<article>") == 2 * 3
    assert page.count('<dl class="facts">') == 2
    assert "document 2 · rejected · " in page and 'src="data:image/png;base64,' in page
    for name in ("chosen", "rejected"):
        assert f"{DATASET}/pairs_{name}_document: 24 documents" in output
    assert output.count("  seq_length  documents that fit") == 2 and "% of the tokens trained" in output


def test_rows_in_a_terminal():
    words = (CHAT, "--vocab-file", TOKENIZER, "--samples", 2, "--seq-length", 300, "--pack-impl", "best_fit")
    output = inspect(*words)
    assert output.count("━━ sample ") == 2 and output.count("── document ") == 4
    assert re.search(r"── padding, positions 0–\d+\n\(\d+ padding tokens\)", output)
    assert "«" in output and "\x1b" not in output, "no colours in a file"
    assert "\x1b[32m" in inspect(*words, "--color", "always")


def test_mistakes(tmp_path: Path):
    for words, message in (
        ((tmp_path / "none", "--vocab-file", TOKENIZER), "none.idx: no such file"),
        ((CHAT,), "--vocab-file"),
        ((CHAT, "--vocab-file", TOKENIZER, "--start", 24), "--start 24: "),
        ((DATASET / "pairs_chosen_document", "--vocab-file", TOKENIZER, "--seq-length", 9), "--seq-length"),
    ):
        error = refused(inspect_samples.main, *words)
        assert error.startswith("inspect.py: error: ") and message in error and "\n" not in error


@pytest.mark.parametrize("tool", with_more(TOOLS, product=set(TOOLS) - ORDINARY))
def test_tools_beside_it_start(tool: str):
    """Python looks in a script's folder first, where this tool has the name of a standard module."""
    done = subprocess.run([sys.executable, FOLDER / tool, "--help"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
