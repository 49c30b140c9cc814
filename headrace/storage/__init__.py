"""Files and folders that survive crashes, that one process at a time writes, or that the Hugging Face hub has.

- `atomic_files`: writes files and folders whole or not at all.
- `whole_folder`: lists the files of a folder with their hashes, and checks them.
- `folder_lock`: keeps a folder to one process at a time, also across machines.
- `adapter_files`: reads which base model a PEFT adapter is for.
- `hub`: fetches models and datasets of the Hugging Face hub as of one commit.
"""
