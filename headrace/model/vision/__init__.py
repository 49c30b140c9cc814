"""Read pictures for a vision-language model, and put what its vision tower makes of them into sequences of tokens.

The text half of such a model runs on the shared attention function like any other; embeddings of images take the place
of those of the image tokens. Nothing here knows about training or sampling.

- `kinds` says what the types differ in, and finds the halves of a model.
- `reader` prepares pictures with the processor of a model's folder, by Pillow.
- `positions` gives tokens their rotary positions in time, height and width, for types that have them.
- `tower` computes the features of images, keeps those of the last ones, and lays them out for a forward pass.
- `cuda_tower` makes towers fast on CUDA: attention of all images in one call, and patches embedded by a product.
- `tiny_vision` makes small models with random weights.
"""
