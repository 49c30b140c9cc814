"""report.html: one page that shows a run.

- `run_report`: collect what a run folder holds and write the page.
- `charts`: choose and draw charts of metrics.
- `async_charts`: charts of staleness, drops and waiting.
- `episodes`: choose the episodes that are shown.
- `svg`: draw curves and stacked bars as inline SVG.
"""
