"""A training run, or several, as one page of HTML that needs no network: curves, events, configuration, data,
answers before and after.

`run_data.py` reads what a run has left, `events.py` finds what happened to it, `curves.py` chooses which
metrics are drawn together and thins them, `figures.py` draws them with bokeh, `facts.py` makes the tables,
`page.py` puts the page together and writes it. Nothing here imports torch; bokeh is imported where it draws.
"""

from megatron.operations.report.page import ReportError, report_at_end, write_report

__all__ = ["ReportError", "report_at_end", "write_report"]
