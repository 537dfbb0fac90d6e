"""A page opened in a real Chromium, without a network, and asked what it shows."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

# Before the page's own scripts: whatever it complains of is kept.
_LISTEN = """<head><script>
window.problems = [];
addEventListener("error", event => problems.push("error: " + (event.message || event.target.src)), true);
addEventListener("unhandledrejection", event => problems.push("rejected: " + event.reason));
for (const level of ["error", "warn"]) console[level] = (...words) => problems.push(level + ": " + words.join(" "));
</script>"""
# After them. What bokeh has drawn of each curve: places on the screen that lie within the plot's frame.
_ASK = """<script>
function shown(plot) {
  const names = plot.renderers.filter(part => part.visible).map(part => part.name);
  const view = Bokeh.index.get(plot), frame = view.frame.bbox, curves = {};
  for (const renderer of plot.renderers.filter(part => part.visible)) {
    const glyph = view.views.find_one(renderer).glyph, name = renderer.data_source.name;
    const inside = Array.from(glyph.sx).filter((x, i) => x >= frame.left - 1 && x <= frame.right + 1
      && (glyph.sy == null || (glyph.sy[i] >= frame.top - 1 && glyph.sy[i] <= frame.bottom + 1)));
    (curves[name] ||= []).push([inside.length, glyph.sx.length]);
  }
  return {name: plot.name, width: frame.width, height: frame.height, curves, low: plot.y_range.start,
          high: plot.y_range.end, names, from: plot.x_range.start, to: plot.x_range.end,
          ground: plot.background_fill_color};
}
const wait = ms => new Promise(done => setTimeout(done, ms));
const plots = () => Bokeh.documents[0].roots().filter(plot => plot.visible);
const visible = () => plots().map(shown);
async function painted() {
  const glyph = (plot, part) => Bokeh.index.get(plot)?.views.find_one(part)?.glyph;
  const glyphs = plot => plot.renderers.filter(part => part.visible).map(part => glyph(plot, part));
  while (!plots().flatMap(glyphs).every(glyph => glyph?.sx)) await wait(50);
}
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const luminance = color => color.slice(0, 3).map(c => c / 255)
  .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
function background(node) {  // the nearest that is not transparent
  for (; node instanceof Element; node = node.parentNode) {
    const color = rgb(getComputedStyle(node).backgroundColor);
    if (color.length < 4 || color[3] > 0) return color;
  }
  return [255, 255, 255];
}
function contrast(node) {
  const [low, high] = [rgb(getComputedStyle(node).color), background(node)].map(luminance).sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function texts() {  // all elements with text of their own
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), nodes = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (walker.currentNode.data.trim() && !["SCRIPT", "STYLE"].includes(node.tagName)) nodes.push(node);
  }
  return nodes.filter(node => node.getClientRects().length);
}
const scrolls = node => node instanceof Element
  && (["auto", "scroll"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentNode));
const place = node => node.tagName + "." + node.className + ": " + node.textContent.trim().slice(0, 60);
function overflowing() {  // what reaches over the window, or is hidden by its box
  return [...document.body.querySelectorAll("*")].filter(node => {
    const box = node.getBoundingClientRect(), style = getComputedStyle(node);
    return box.width && (box.right > innerWidth + 1 && !scrolls(node)
      || style.overflowX === "hidden" && node.scrollWidth > node.clientWidth + 1);
  }).map(place);
}
async function ask() {
  const findings = {title: document.title, width: document.documentElement.scrollWidth};
  findings.window_width = innerWidth;
  findings.overflowing = overflowing();
  findings.low_contrast = texts().filter(node => contrast(node) < 4.5)
    .map(node => contrast(node).toFixed(2) + " " + place(node));
  findings.text = document.body.innerText;
  const drawn = typeof Bokeh !== "undefined";
  while (drawn && !Bokeh.documents.length) await wait(50);  // embedding goes on beside
  if (drawn && Bokeh.documents[0].roots().length) {
    await painted();
    findings.plots = visible();
    for (const box of document.querySelectorAll("[data-plots], [data-event]")) box.click();
    for (const choice of document.querySelectorAll("[data-map]")) {
      choice.selectedIndex = choice.options.length - 1;
      choice.dispatchEvent(new Event("change"));
    }
    await wait(500);
    await painted();
    findings.clicked = visible();
    const [first] = Bokeh.documents[0].roots();
    const {from, to} = findings.plots[0];
    [first.x_range.start, first.x_range.end] = [from, (from + to) / 2];
    await wait(500);
    findings.zoomed = visible().map(plot => plot.to);
  }
  findings.loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  findings.problems = window.problems;
  const node = document.createElement("pre");
  node.id = "findings";
  node.textContent = JSON.stringify(findings);
  document.body.append(node);
  if (parent !== window) parent.postMessage(node.textContent, "*");
}
ask().catch(problem => { document.title = "FAILED " + problem.stack; });
</script></body>"""


_MIN_WIDTH = 500  # width of a window of Chromium
_FRAME = """<!DOCTYPE html><html><head><title>frame</title></head><body>
<iframe src="{page}" style="width: {width}px; height: 2000px; border: 0"></iframe>
<script>
addEventListener("message", event => {{
  const node = document.createElement("pre");
  node.id = "findings";
  node.textContent = event.data;
  document.body.append(node);
}});
</script></body></html>"""


def open_sound_page(page: Path, width: int = 1200, dark: bool = False) -> dict[str, Any]:
    """`open_page`, of a page that complains of nothing, fetches nothing, fits the window and can be read."""
    answers = open_page(page, width, dark)
    for name in ("problems", "console", "loaded", "overflowing", "low_contrast"):
        assert answers[name] == [], (name, answers[name])
    assert answers["width"] <= answers["window_width"] == width, "nothing reaches over the edge"
    return answers


def open_page(page: Path, width: int = 1200, dark: bool = False) -> dict[str, Any]:
    """Returns what Chromium shows of the page at a window's width. dark: the reader prefers dark colours.

    `plots`, each with its curves as (points inside the frame, points); `names`: of all that is drawn;
    `clicked`: the same after a click on every box and with the last of every choice; `zoomed`: where the
    ranges end after half of one was chosen; `text`: what stands there; `problems` of the console; `loaded`:
    what was fetched beside the page. `overflowing`: elements that reach over the window or out of their box;
    `low_contrast`: those whose text has a contrast below 4.5 (WCAG 2).
    """
    chromium = shutil.which("chromium")
    assert chromium is not None, "make test-browser installs it"
    copy = page.with_name(f"{page.stem}.asked.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("<head>") == 1 and text.count("</body>") == 1
    copy.write_text(text.replace("<head>", _LISTEN).replace("</body>", _ASK), encoding="utf-8")
    if width < _MIN_WIDTH:  # Chromium's windows are not as narrow, but frames are
        frame = page.with_name(f"{page.stem}.frame.html")
        frame.write_text(_FRAME.format(width=width, page=copy.name), encoding="utf-8")
        copy = frame
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000",
         "--enable-logging=stderr", "--v=0", f"--window-size={width},2000",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, re.S)
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert match is not None, f"{title and title[1]}\n{done.stderr[-3000:]}"
    answers: dict[str, Any] = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    answers["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "[bokeh" not in line]
    return answers
