"""Fast paths on the CPU.

- `layers`: RMS norm, rotary embedding and gated SiLU with few passes through memory.
- `forward`: the forward pass of plain decoder layers without module calls, for sampling.
- `packed_linear`: linear layers whose weights oneDNN packs once.
"""
