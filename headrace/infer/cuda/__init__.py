"""Sampling on CUDA: a dense decoder in Triton kernels and matrix products, captured in graphs.

`weights` (what is read of a model), `layout` (how work is cut up), `kernels` and `draw` (Triton), `forward` (one pass),
`decoder` (state and graphs). The last four need Triton; `graph_decoder` looks whether it is there.
"""

import logging

from headrace.errors import SamplerError
from headrace.infer.cuda.weights import HALF, unsupported_reason
from headrace.infer.visits import Decoder
from headrace.model.cuda import available
from headrace.model.load import LanguageModel

logger = logging.getLogger(__name__)


def graph_decoder(
    lm: LanguageModel, *, max_rows: int, kv_tokens: int, graphs: bool | None = None, deterministic: bool = False
) -> Decoder | None:
    """A decoder for this model, or None where the plain path is to be used.

    `graphs` None: in half precision on CUDA, if the model's layers are known; True: or an error says why not.
    """
    why = "Triton is not installed" if lm.device.type == "cuda" and not available() else unsupported_reason(lm)
    if graphs and why is not None:
        raise SamplerError(f"engine.graphs is true, but this model cannot be decoded in CUDA graphs: {why}")
    if graphs is False or why is not None or (graphs is None and lm.dtype not in HALF):
        if graphs is None and lm.device.type == "cuda":
            logger.info("decoding without CUDA graphs: %s", why or f"the model is in {lm.dtype}")
        return None
    from headrace.infer.cuda.decoder import GraphDecoder  # needs Triton

    return GraphDecoder(lm, max_rows=max_rows, kv_tokens=kv_tokens, deterministic=deterministic)
