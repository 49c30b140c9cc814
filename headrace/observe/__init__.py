"""Record runs and show them: metrics, rollouts, the report, the viewer, and texts about configurations and machines.

- `run_folder.py` names the files of a run; `json_lines.py` writes them.
- `run_warnings.py` shows each warning of a run once, and lists those about the run for the report.
- `activity.py` records what the parts of a run are doing, second by second.
- `config_changes.py` records the keys that resumes changed, `outcome.py` how a run ended; `run_list.py` lists runs.
- `sinks/` takes metrics: files, terminals, other systems, alerts.
- `buffer/` commits each step of a run as one transaction.
- `rollouts/` writes and reads the episodes of training steps.
- `report/` writes report.html; `viewer/` is `headrace view`; `comparison/` is `headrace compare`,
  `dashboard/` is `headrace dashboard`.
- `machine.py` collects facts for `headrace doctor`, with `import_probe.py` importing packages in a process of its own.
- `explain_text.py` is the text of `headrace explain`.
"""
