"""Compare runs or checkpoints: the same figures, curves, held-out tasks and episodes, beside each other.

- `arms`: what is compared: runs read from their folders, alone or as the seeds of one setting.
- `held_out`: the tasks of an evaluation, their scores, and the paired differences.
- `compared`: compute the whole comparison: final figures, configurations' differences, evaluation, episodes.
- `overlay`: curves of several runs over each other.
- `comparison_tables`: the comparison as tables for a terminal, and as JSON.
- `compare_page`: the comparison as one page.
"""
