"""The protobuf messages of the wire, as a table of field numbers, and message classes made from it.

The classes are built when this module is imported, in a descriptor pool of their own: a program that also loads other
generated classes of the same names (the public SDK does) does not clash with them, no compiler is needed, and nothing
here depends on which protobuf release generated what.

A field is `number name type`; `*` before the type: repeated; `?`: optional, so that absent differs from empty; `@`: one
of the message's alternatives.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"

ENUMS = {
    "DType": "0 DTYPE_UNSPECIFIED; 1 DTYPE_FLOAT32; 2 DTYPE_INT64; 3 DTYPE_INT32; 4 DTYPE_BFLOAT16",
    "StopReason": "0 STOP_REASON_STOP; 1 STOP_REASON_LENGTH",
}

MESSAGES = {
    "ForwardBackwardRequest": (
        "1 model_id string; 2 seq_id int32; 3 data *Datum; 4 loss_fn string; 5 loss_fn_config map<double>; "
        "6 forward_only bool; 7 loss_fn_config_v2 map<LossConfigValue>"
    ),
    "LossConfigValue": "1 number @double; 2 text @string",
    "Datum": (
        "1 model_input *Chunk; 2 loss_fn_inputs map<Tensor>; 3 model_input_spans *ProvenanceSpan; "
        "4 loss_fn_input_spans *ProvenanceSpan"
    ),
    "Chunk": "1 encoded_text @EncodedTextChunk; 2 image @ImageChunk; 3 dmel @DmelChunk",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes; 2 format string; 3 expected_tokens ?int32; 4 override_dimensions ?ImageDimensions",
    "ImageDimensions": "1 width uint32; 2 height uint32",
    "DmelChunk": "1 dmel bytes",
    "Tensor": "1 dense @bytes; 2 sparse_csr @SparseCsr; 3 dtype DType; 4 shape *int64",
    "SparseCsr": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "ProvenanceSpan": "1 prompt_tokens @TokenSpan; 2 sampled_tokens @TokenSpan",
    "TokenSpan": "1 sequence_id string; 2 offset int64; 3 length int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string; 2 loss_fn_outputs *ArrayRecord; 3 metrics map<double>",
    "ArrayRecord": "1 type_tag string; 2 fields map<BatchedTensor>; 3 num_datums int64",
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype DType; 4 trailing_shape *int64",
    "SampleResponse": (
        "1 sequences *SampledSequence; 2 prompt_logprobs ?bytes; 3 topk_prompt_logprobs ?TopkLogprobs; "
        "4 prompt_cache_hit_tokens int32; 5 target_prompt_logprobs ?Tensor; 6 prompt_alt_tokens ?PromptAltTokens"
    ),
    "SampledSequence": (
        "1 stop_reason StopReason; 2 tokens bytes; 3 logprobs ?bytes; 4 topk_sampled_logprobs ?TopkLogprobs"
    ),
    "TopkLogprobs": "1 token_ids bytes; 2 logprobs bytes; 3 k uint32; 4 length uint32",
    "PromptAltTokens": "1 tokens Tensor; 2 logprobs Tensor",
}

FLOAT32, INT64, INT32 = 1, 2, 3  # of DType
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="headrace/wire.proto", package=PACKAGE, syntax="proto3")
    for name, rows in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for row in rows.split("; "):
            number, value = row.split(" ")
            enum.value.add(name=value, number=int(number))
    for name, rows in MESSAGES.items():
        message = file.message_type.add(name=name)
        for row in rows.split("; "):
            number, field, kind = row.split(" ")
            _add_field(message, int(number), field, kind)
        _name_optionals(message)
    return file


def _add_field(message: Any, number: int, name: str, kind: str) -> None:
    mark = kind[0] if kind[0] in "*?@" else ""
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map<"):
        entry = message.nested_type.add(name=f"{_camel(name)}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "key", "string")
        _add_field(entry, 2, "value", kind[4:-1])
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    _set_type(field, kind.removeprefix(mark))
    if mark == "*":
        field.label = _Field.LABEL_REPEATED
    elif mark == "?":
        field.proto3_optional = True
    elif mark == "@":
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _Field.TYPE_ENUM if kind in ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"


def _name_optionals(message: Any) -> None:
    """Every optional field needs a one-of of its own, behind the real one."""
    for field in message.field:
        if field.proto3_optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
SampleResponse = _class("SampleResponse")
