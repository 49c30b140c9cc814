"""Files and folders that survive crashes, and that one process at a time writes.

- `atomic_files`: writes files and folders whole or not at all.
- `whole_folder`: lists the files of a folder with their hashes, and checks them.
- `folder_lock`: keeps a folder to one process at a time, also across machines.
"""
