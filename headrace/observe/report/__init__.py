"""report.html: one page that shows a run.

- `run_report`: collect what a run folder holds and write the page.
- `report_process`: write it in a process of its own.
- `report_sink`: write it again while a run lasts.
- `subject`: what each stage trained on, for the top of the page.
- `charts`: choose and draw charts of metrics.
- `async_charts`: charts of staleness, drops and waiting.
- `episodes`: choose the episodes that are shown.
- `html_page`: the template environment, style sheet and script of pages.
- `svg`: draw curves and stacked bars as inline SVG.
"""
