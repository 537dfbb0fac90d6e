"""Renders one or more training runs as one page of HTML that needs no network access.

It shows curves, events, configuration, data, and answers before and after training. `run_data.py` reads a
run's files, `events.py` derives its events, `curves.py` groups and thins metrics. `figures.py` draws them
with bokeh, `facts.py` makes the tables, `page.py` renders and writes the page. Nothing here imports torch;
bokeh is imported only to draw.
"""

from megatron.operations.report.page import ReportError, report_at_end, write_report
