"""Data: rows from files and functions, made into tasks, conversations and preference pairs.

- `rows`: read rows from JSONL, Parquet, a dataset of the hub or on disk, reasoning-gym or a user's function.
- `row_formats`: recognise OpenAI messages, ShareGPT, Alpaca, TRL's and verl's rows by their columns.
- `picture_columns`: read the pictures of a row, and leave out rows whose pictures cannot be read.
- `task_rows`: turn rows into tasks.
- `task_source`: give out tasks in an endless, seeded, resumable order; filter prompts.
- `curriculum`: draw tasks by how uncertain their success is.
- `task_mixture`: mix several sources of tasks by weight.
- `conversations`: read conversations for SFT and mix several sets by weight.
- `preferences`: read pairs of a chosen and a rejected conversation.
- `demonstrations`: write conversations from episodes that a policy played.
- `shuffle`: order data by a counter-based permutation, and fingerprint it.
"""
