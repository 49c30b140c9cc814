"""Split the tensors of a model into buckets: what a server receives in one request, and must have room for."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from headrace.infer.servers.api import TensorSpec

BUCKET_BYTES = 512 * 2**20

Bucket = list[tuple[str, Tensor]]


def split_into_buckets(tensors: Mapping[str, Tensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yield the tensors in their order, at most `limit_bytes` at a time; a larger tensor is a bucket of its own.

    >>> import torch
    >>> model = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(9), "d": torch.zeros(1)}
    >>> [[name for name, _ in bucket] for bucket in split_into_buckets(model, limit_bytes=20)]
    [['a', 'b'], ['c'], ['d']]
    """
    bucket, size_bytes = Bucket(), 0
    for name, tensor in tensors.items():
        if bucket and size_bytes + tensor.nbytes > limit_bytes:
            yield bucket
            bucket, size_bytes = Bucket(), 0
        bucket.append((name, tensor))
        size_bytes += tensor.nbytes
    if bucket:
        yield bucket


def specs_of(bucket: Sequence[tuple[str, Tensor]]) -> list[TensorSpec]:
    """Describe the tensors of a bucket."""
    return [
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in bucket
    ]
