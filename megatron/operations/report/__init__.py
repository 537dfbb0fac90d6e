"""Writes the report of one or more training runs: one page of HTML that needs no network access.

The page shows curves, events, configuration, data, and answers before and after training. `run_data.py` reads
a run's files, `events.py` derives events from them, `curves.py` groups metrics into plots and thins them,
`router_loads.py` reads the load of experts. `figures.py` draws with bokeh, `facts.py` makes the tables,
`page.py` renders and writes the page. No module here imports torch; bokeh is imported only to draw.
"""

from megatron.operations.report.page import ReportError, report_at_end, write_report
