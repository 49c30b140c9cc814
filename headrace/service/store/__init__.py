"""Records, requests and checkpoints on disk, and their copy in memory.

- `journal`: records and requests in SQLite or PostgreSQL.
- `entities`: sessions, models, samplers and checkpoints as values.
- `registry`: the same in memory, each with one owner.
- `checkpoint_folders`, `checkpoint_copy`: folders of checkpoints; copies between owners.
- `cleanup`: remove what a killed server left.
- `ownership`: one folder, one journal, one server.
"""
