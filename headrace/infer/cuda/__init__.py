"""Multi-step decoding on CUDA: a dense transformer in Triton kernels and matrix products, captured in CUDA graphs.

- `layer_weights.py` reads the weights of a model, joined and merged where faster, and says which models it supports.
- `tiling.py` chooses tile sizes: how rows, prompts and keys are divided among programs.
- `kernels.py` has the Triton kernels of a layer, `sampling_kernels.py` those that sample a token.
- `adapter_kernels.py` adds the updates of adapters, a different one for each block of rows; `adapter_factors.py` holds
  the factors and launches those kernels.
- `forward.py` runs one forward pass over rows of tokens.
- `graphs.py` implements `Decoder`: state on the device, and a CUDA graph per number of rows.
- `module_graphs.py` captures the modules of mixtures and hybrids instead.

All but the first two need Triton; `graph_decoder` checks that it is installed.
"""

import logging

from headrace.errors import SamplerError
from headrace.infer.cuda.layer_weights import HALF, unsupported_reason
from headrace.infer.multistep import Decoder
from headrace.model.cuda import available
from headrace.model.load import LanguageModel
from headrace.model.multi_lora import AdapterTable

logger = logging.getLogger(__name__)

MODULE_TYPES = (  # whose own modules are captured: mixtures and hybrids
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "nemotron_h",
    "deepseek_v3",
    "glm4_moe_lite",
)


def graph_decoder(
    lm: LanguageModel,
    *,
    max_num_seqs: int,
    kv_tokens: int,
    graphs: bool | None = None,
    deterministic: bool = False,
    adapters: AdapterTable | None = None,
    record_experts: bool = True,
) -> Decoder | None:
    """Return a decoder for this model, or None if the engine should decode with the model's own modules step by step.

    `graphs` None uses CUDA graphs in half precision, if the model is supported; True raises SamplerError if it is not.
    """
    if graphs is not False and not deterministic and adapters is None and _captures_modules(lm):
        from headrace.infer.cuda.module_graphs import ModuleDecoder  # needs Triton

        return ModuleDecoder(lm, max_num_seqs=max_num_seqs, record_experts=record_experts)
    reason = "Triton is not installed" if lm.device.type == "cuda" and not available() else unsupported_reason(lm)
    if graphs and reason is not None:
        raise SamplerError(f"engine.cuda_graphs is true, but this model cannot be decoded in CUDA graphs: {reason}")
    if graphs is False or reason is not None or (graphs is None and lm.dtype not in HALF):
        if graphs is None and lm.device.type == "cuda":
            logger.info("decoding without CUDA graphs: %s", reason or f"the model is in {lm.dtype}")
        return None
    from headrace.infer.cuda.graphs import GraphDecoder  # needs Triton

    return GraphDecoder(
        lm, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens, deterministic=deterministic, adapters=adapters
    )


def _captures_modules(lm: LanguageModel) -> bool:
    """Tell whether a decode step of the model's own modules can be captured: nothing in it waits for the device."""
    config = lm.model.config
    kind = getattr(config, "rope_parameters", None) or {}
    fixed = kind.get("rope_type", "default") not in ("dynamic", "longrope")  # those read the longest position
    return lm.device.type == "cuda" and available() and lm.dtype in HALF and config.model_type in MODULE_TYPES and fixed
