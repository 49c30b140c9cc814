"""Learning from preferences without a reward model: DPO, IPO, KTO, ORPO and SimPO.

- `examples.py` renders pairs and labelled replies, and makes the data of an update of them.
- `reference_scores.py` scores them with the reference model, once, and keeps the log-probs in a file.
- `train.py` is the loop.
"""
