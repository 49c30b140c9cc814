"""The binary wire: protobuf messages to values of the package and back.

- `wire.proto`, `wire.binpb`: the message layout and its compiled descriptors (`make proto`).
- `proto`: message classes from the descriptors.
- `messages`: bytes to values and back.
- `image_chunks`: image chunks to tokens and pictures.
- `loss_conversion`: wire losses and data to losses and data of the package.
- `server_inputs`: inputs that the server is asked to compute.
"""
