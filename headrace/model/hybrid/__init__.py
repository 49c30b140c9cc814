"""Layers with a state in place of keys and values: causal convolutions, the gated delta rule and Mamba-2.

transformers' own torch code runs them over a whole row of tokens, so packed sequences would leak into each other. These
know where sequences begin, which prefix they share, and where their state is in the engine's slots.

- `layers.py` lets the layers of a model be computed here, on packed tokens or against the slots of a cache.
- `delta_rule.py` computes the gated delta rule: chunk by chunk over packed sequences, token by token over slots.
- `state_space.py` computes Mamba-2's recurrence in the same two ways.
- `convolution.py` computes short causal convolutions over packed sequences and over slots.
- `layout.py` lays packed sequences out in chunks, and the rows of an engine's step in runs of one slot each.
- `states.py` holds the states of the engine's slots, and a second set that sequences with the same prompt start from.
"""
