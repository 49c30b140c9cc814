"""Message classes for the wire's protobuf bodies, built from the compiled `wire.proto`.

The descriptors live in a pool of their own, so they do not clash with the public SDK's generated classes, which have
the same names, when one program loads both. `make proto` compiles `wire.proto` into `wire.binpb`.
"""

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
DESCRIPTORS = Path(__file__).with_name("wire.binpb")  # a FileDescriptorSet

FLOAT32, INT64, INT32 = 1, 2, 3  # of DType


def _load_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return pool


_pool = _load_pool()


def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _message_class("ForwardBackwardRequest")
ForwardBackwardOutput = _message_class("ForwardBackwardOutput")
SampleResponse = _message_class("SampleResponse")
