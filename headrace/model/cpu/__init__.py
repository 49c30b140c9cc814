"""Fast paths on the CPU.

- `layers.py` computes RMS norm and rotation with few passes through memory.
- `forward.py` computes the forward pass of plain decoder layers without module calls, for sampling.
- `float64.py` keeps float64 models in float64 where transformers would round to float32.
- `packed_linear.py` has linear layers whose weights oneDNN packs once.
"""
