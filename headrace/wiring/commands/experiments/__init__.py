"""Commands that look at more than one model or run.

- `eval_checkpoints`: play the held-out tasks with several checkpoints, keep the episodes and compare.
- `compare_runs`: compare run folders.
- `sweep`: run the product of several settings, one run after the other, and compare them.
- `sweep_plan`: the settings of a sweep, the names of its runs, and its manifest.
- `run_process`: run `headrace` in a process of its own, and end it if it gives no sign of life.
- `ray_jobs`: the runs of a sweep as jobs of a Ray cluster.
"""
