"""Training on one device: the backend, its optimiser, checkpoints, and frozen models to compare with.

- `torch_backend.py` implements the training verbs: forward, forward_backward, optim_step, save, load, export.
- `batch.py` binds a request's loss and checks its data; `micro_batch.py` computes losses and gradients.
- `image_inputs.py` gives the images of a micro-batch to the model.
- `optimizer.py` is AdamW with float32 masters; `cuda_adam.py` has its CUDA kernels.
- `offload.py` moves its state to host memory and back.
- `schedule.py` computes the learning rate of a step.
- `trainer_state.py` saves and loads what a backend has trained; `state_writer.py` writes it beside training;
  `checkpoint.py` keeps whole checkpoints of a run.
- `frozen_model.py` scores data with a model that is not trained; `frozen_cache.py` is an LRU cache of such models.
"""
