"""Estimates from an evaluation: scores of tasks, intervals, and paired tests of two policies.

- `task_scores`: pass@1, pass@k, maj@k and the mean reward of each task.
- `intervals`: means and shares with 95 % intervals.
- `paired_test`: the paired difference of two policies on the same tasks, with a p-value.
"""
