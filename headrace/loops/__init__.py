"""Training loops: each calls the stages of training in order and holds no logic of its own.

- `rl.py` is reinforcement learning; `sft.py` supervised fine-tuning; `reward_model.py` trains a judge on
  preference pairs; `preference` trains the policy on them, without a judge (DPO and its kin);
  `distill.py` follows a teacher on episodes that the student plays.
- `update.py` makes one optimiser update; `step_batch.py` prepares the data of an RL step and what its loss takes.
- `critic.py` computes advantages from values and trains the values; `kl_limit.py` bounds the KL of a step.
- `evaluate.py` plays held-out tasks; `checkpointer.py` saves checkpoints and ends a run on request.
- `episode_metrics.py` summarises episodes as metrics; `credit_log.py` logs advantages; `credit_health.py` stops a run
  whose advantages cannot teach anything.
- `rescore_saved.py` scores and credits saved rollouts again, without a model.
"""
