"""`headrace dashboard`: a live page over run folders, which it only reads.

- `server`: listen, and run beside a training run; `access`: who may ask, and what a page may do.
- `app`: the page, its files, and the answers to what they ask.
- `followed_runs`: the runs below some folders; `followed_run`: one of them, read as it grows; `tail`: files that grow.
- `curves`: metrics in columns, thinned for drawing.
- `lanes`: what each part of a run does, and who waits for whom.
- `advice`: what holds a run up, in plain words; `alert_history`: the alerts that its rules gave.
- `paired`: held-out scores of several runs, with paired tests.
- `episode_index`: an index of all episodes; `episode_json`: one episode as the page shows it.
"""
