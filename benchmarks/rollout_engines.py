"""What `rollout.py` compares: the embedded engine, vLLM and transformers on one model shape with random weights.

Each is a function of prompts, samples a prompt and new tokens; it draws them all, with the log-prob of each, and gives
their number.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from shapes import SHAPES, Shape
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngineFactory
from lqrl.engines.transaction import loadable_tensors
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

Prompts = list[list[int]]
Call = Callable[[Prompts, int, int], int]

# One scale for the whole cache is vLLM's usual fp8; scales of tokens and heads need a slower kernel there.
_VLLM_CACHE = {"none": "auto", "fp8": "fp8", "fp8_static": "fp8", "int8": "int8_per_token_head"}
_STD = 0.02  # of the weights


@dataclass(frozen=True)
class Setting:
    """What an engine is built for.

    Attributes:
        engine: a key of `ENGINES`.
        model: a key of `SHAPES`.
        format, kv: of weights and cache.
        batch, positions: most samples, and most tokens of one.
        device, dtype: as torch calls them.
        graphs: numbers of rows that vLLM captures its steps for.
    """

    engine: str
    model: str
    format: str
    kv: str
    batch: int
    positions: int
    device: str
    dtype: str
    graphs: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme.preset(self.format if self.kv == "none" else f"{self.format}+kv_{self.kv}")

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def spec(self, scheme: QuantScheme) -> EngineSpec:
        """For engines of this library."""
        config = self.shape.config(self.positions)
        return EngineSpec(config, scheme, self.torch_dtype, torch.device(self.device), self.positions, ())


# ---------------------------------------------------------------- the embedded engine


def torch_engine(setting: Setting) -> Call:
    """`lqrl.engines.TorchEngine`, its weights drawn where they will lie."""
    engine = TorchEngineFactory(max_num_seqs=setting.batch)(setting.spec(setting.scheme))
    engine.update_weights(random_weights(engine.decoder.model, setting.scheme), policy_version=0)

    def call(prompts: Prompts, samples: int, new: int) -> int:
        params = SamplingParams(n=samples, max_tokens=new, ignore_eos=True)
        groups = engine.generate([Prompt(i, tuple(p)) for i, p in enumerate(prompts)], params, seed=0)
        return sum(len(c.token_ids) for group in groups for c in group)

    return call


def random_weights(model: nn.Module, scheme: QuantScheme) -> Iterator[tuple[str, Tensor]]:
    """A complete stream for an engine's model: random codes and weights, scales that make them as wide, norms of 1."""
    scale = _STD / (4.6 if scheme.weight is not None and scheme.weight.dtype in ("int4", "int3") else 60.0)
    for name, held in loadable_tensors(model)[0].items():
        new = torch.empty_like(held)
        if held.dtype == torch.float8_e4m3fn:
            new.copy_(torch.randn(held.shape, device=held.device, dtype=torch.bfloat16).mul_(60).clamp_(-448, 448))
        elif held.dtype == torch.int8:
            new.random_(-104, 105)
        elif not held.dtype.is_floating_point:
            new.random_()
        elif name.endswith("_scale"):
            new.fill_(scale if "weight" in name else 0.05)
        elif held.dim() == 1:
            new.fill_(1.0)
        else:
            new.normal_(std=_STD)
        yield name, new


# ---------------------------------------------------------------- vLLM


def vllm_engine(setting: Setting) -> Call:
    """``vllm.LLM`` with dummy weights in the layouts that this library's vLLM engine uses, captured graphs on CUDA.

    Samples have no seeds of their own: vLLM is faster without.
    """
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    from lqrl.engines.vllm.served import ServedModel

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": setting.dtype,
        "max_model_len": setting.positions,
        "max_num_seqs": setting.batch,
        "kv_cache_dtype": _VLLM_CACHE[setting.kv],
        "disable_log_stats": True,
        "seed": 0,
    }
    if setting.device == "cpu":
        arguments |= {"enforce_eager": True, "distributed_executor_backend": "uni", "kv_cache_memory_bytes": 2**28}
    else:
        captures = {"cudagraph_capture_sizes": list(setting.graphs)}
        arguments |= {"gpu_memory_utilization": 0.92, "compilation_config": captures}
    with tempfile.TemporaryDirectory() as directory:
        served = ServedModel(setting.spec(QuantScheme.preset(setting.format)), unties=setting.device == "cpu")
        served.config.save_pretrained(directory)
        llm = LLM(model=directory, **arguments)
    if setting.kv != "none":
        llm.collective_rpc(_fill_cache_scales)

    def call(prompts: Prompts, samples: int, new: int) -> int:
        params = VllmParams(
            n=samples,
            temperature=1.0,
            max_tokens=new,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return call


@torch.inference_mode()
def _fill_cache_scales(worker: Any) -> None:
    """Dummy loading draws these too, of either sign, where a checkpoint may have them."""
    for layer in worker.get_model().modules():
        if isinstance(getattr(layer, "_k_scale", None), Tensor):
            for name in ("_q_scale", "_k_scale", "_v_scale"):
                getattr(layer, name).fill_(1.0)
                setattr(layer, f"{name}_float", 1.0)


# ---------------------------------------------------------------- transformers


class _ChosenLogprobs(LogitsProcessor):
    """Keeps the log-prob of each token that generate chose, which it sees one step later."""

    def __init__(self) -> None:
        self.chosen: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.add(input_ids[:, -1:])
        self._last = torch.log_softmax(scores.float(), -1)
        return scores

    def add(self, tokens: Tensor) -> None:
        """The tokens ``[B, 1]`` that were drawn from the last scores."""
        if self._last is not None:
            self.chosen.append(self._last.gather(1, tokens))


def _transformers_model(setting: Setting, attention: str) -> PreTrainedModel:
    config = setting.shape.config(setting.positions)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=setting.torch_dtype, attn_implementation=attention)
    return model.eval()


def transformers_engine(setting: Setting) -> Call:
    """``generate``, which pads; every sample is a row."""
    model: Any = _transformers_model(setting, "sdpa")

    @torch.no_grad()
    def call(prompts: Prompts, samples: int, new: int) -> int:
        rows, longest = [p for p in prompts for _ in range(samples)], max(map(len, prompts))
        pads = [longest - len(row) for row in rows]
        ids = torch.tensor([[0] * n + row for n, row in zip(pads, rows, strict=True)], device=setting.device)
        mask = (torch.arange(longest) >= torch.tensor(pads)[:, None]).to(setting.device)
        kept = _ChosenLogprobs()
        out = model.generate(
            ids, attention_mask=mask, logits_processor=LogitsProcessorList([kept]), pad_token_id=0,
            do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new,
        )[:, longest:]  # fmt: skip
        kept.add(out[:, -1:])
        assert torch.cat(kept.chosen, 1).cpu().shape == out.shape
        return out.numel()

    return call


def batching_engine(setting: Setting) -> Call:
    """transformers' continuous batching, ``generate_batch``."""
    from transformers import ContinuousBatchingConfig

    model: Any = _transformers_model(setting, "paged|sdpa")

    def call(prompts: Prompts, samples: int, new: int) -> int:
        drawn: dict[str, Any] = model.generate_batch(
            [p for p in prompts for _ in range(samples)],
            generation_config=GenerationConfig(do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True),
            persistent_manager=True,
        )
        return sum(len(output.logprobs) for output in drawn.values())

    return call


ENGINES: dict[str, Callable[[Setting], Call]] = {
    "vllm": vllm_engine,
    "transformers": transformers_engine,
    "transformers-cb": batching_engine,
    "torch": torch_engine,
}
"""By name, in the order in which they are measured."""
