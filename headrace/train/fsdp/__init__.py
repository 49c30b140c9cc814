"""Training on several ranks with FSDP2: weights, gradients and optimiser state are sharded.

- `backend.py` implements the training verbs on the first rank; `rank_backend.py` is each rank's part of them.
- `loading.py` makes a model without weights, which are read layer by layer; `sharding.py` shards a model.
- `sharded_adam.py` is AdamW over the shards of a rank.
- `dealing.py` deals the data of a request to ranks.
- `ranks.py` starts and watches ranks; `rank_process.py` serves commands on all but the first.
- `launch.py` recognises ranks that torchrun or Slurm has started.
- `checkpoints.py` saves and loads the shards, for any number of ranks; `saving.py` writes them beside training.
"""
