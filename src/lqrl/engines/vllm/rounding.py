"""Where vLLM's decoders round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lqrl.modeling.arithmetic import Arithmetic

if TYPE_CHECKING:
    from lqrl.engines.vllm.factory import VLLMEngineFactory


def vllm_arithmetic(platform: str, options: VLLMEngineFactory) -> Arithmetic:
    """What vLLM's Llama and Qwen decoders compute with, read in its sources (0.26 to 0.32) and compared with them.

    Its CUDA kernels (``csrc/libtorch_stable/layernorm_kernels.cu``), eager and batch-invariant, norm the rounded sum
    and round once. Its PyTorch norm (``vllm/ir/ops/layernorm.py``) norms the sum in fp32, and rounds before the weight
    as well; the CPU build runs it as it is, its compiler leaves out roundings inside a kernel. Rotary embeddings turn
    in fp32 with cosines and sines in the model's dtype. Logits are a product in that dtype, unless ``fp32_head``.

    Args:
        platform: where it runs, as torch calls it.
        options: the engine's; without ``enforce_eager`` it compiles on a GPU.
    """
    eager = options.engine_args.get("enforce_eager", platform == "cpu")
    return Arithmetic(
        rounds_sums=eager and platform != "cpu",
        rounds_normed=eager and platform == "cpu",
        rounds_rotated=False,
        rounds_logits=not options.fp32_head,
    )
