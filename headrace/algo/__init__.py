"""Algorithms as pure functions: credit, losses, weights and staleness, without I/O, clock or configuration.

- `advantages`: credit methods, from scored episodes to one advantage per step.
- `losses`: loss functions by name, each a plain sum over tokens, sequences, pairs or groups.
- `loss_signature`: the signature of a loss, the unit it sums over and its result.
- `loss_weights`: normalisation of a loss, written into the weights of a whole training step.
- `correction`: off-policy behaviour weights and masks of a training step.
- `shaping`: rewards adjusted before credit (length penalty, KL), and the filter of groups without signal.
- `kl_control`: an adaptive KL coefficient, and scaling an update back to a KL limit.
- `datum`: episodes and rendered conversations as training data.
- `units`: pairs and groups of data that a loss must see together.
- `packing`: data packed into micro-batches, and common prefixes computed once.
- `staleness`: how many groups may start, and whether a finished group is still fresh enough to train on.
- `staleness_metrics`, `statistics`: metrics of token age and its cost; KL estimators, mismatch, pass@k.
- `estimates`: scores of held-out tasks, intervals, and paired tests of two policies.
- `segment_ops`: sums, means and log-sum-exp over segments of a tensor.
- `random`: stateless seeds and uniform numbers.
- `name_lookup`: tables looked up by a user's name, with the nearest name in the error.
"""
