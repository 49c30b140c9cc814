"""Record runs and show them: metrics, rollouts, the report, the viewer, and texts about configurations and machines.

- `run_folder.py` names the files of a run; `json_lines.py` writes them.
- `sinks/` takes metrics: files, terminals, other systems, alerts.
- `buffer/` commits each step of a run as one transaction.
- `rollouts/` writes and reads the episodes of training steps.
- `report/` writes report.html; `viewer/` is `headrace view`.
- `machine.py` collects facts for `headrace doctor`, with `import_probe.py` importing packages in a process of its own.
- `explain_text.py` is the text of `headrace explain`.
"""
