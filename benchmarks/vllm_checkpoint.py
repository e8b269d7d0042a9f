"""Checkpoints that lqrl exported, loaded by a real vLLM: does it compute the log-probs of lqrl's own engine?

A random Qwen3, dense and as a mixture of experts, is exported in each format. lqrl's engine of that format samples
tokens and scores them in one forward pass in bf16; vLLM loads the directory and scores the same tokens. For each
format: tokens, difference of the log-probs of the sampled tokens, k3 (its mean is the KL divergence of the two), share
of positions whose most likely token is the same; then what to read these by: the difference that lqrl's aligned
learner has, and the one that an unquantized bf16 learner has, which is the format's own error. The row bf16 is the
floor: nothing is quantized there.

    python benchmarks/vllm_checkpoint.py
    python benchmarks/vllm_checkpoint.py --formats int8_w8a8 fp8_per_channel --families dense --jobs 1
    python benchmarks/vllm_checkpoint.py --peer lqrl --device cpu --tiny     # without vLLM: lqrl reads it back

Each format runs in a process of its own, so that one failure is one line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from options import positive
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from lqrl.engines import EngineSpec, TorchEngineFactory
from lqrl.engines.torch import TorchEngine
from lqrl.learner.kv_scales import calibrate_kv_
from lqrl.learner.scorer import Scorer
from lqrl.modeling.attention import PackedContext
from lqrl.modeling.backbone import load_model
from lqrl.quant import QuantScheme, export_weights, prepare_
from lqrl.quant.checkpoint import load_quantized, save_quantized
from lqrl.quant.checkpoint_reader import full_precision_config
from lqrl.quant.kv import calibrates_kv, kv_rounding, prepare_kv_
from lqrl.types import Prompt, SamplingParams

DTYPE = torch.bfloat16
MAX_LEN = 256
FORMATS = {
    "dense": (
        *("bf16", "int8_w8a8", "int8_w8a16", "int4_w4a16", "int4_w4a16_g32"),
        *("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4_w4a16", "nvfp4_w4a16", "nvfp4_w4a4"),
        *("int8_w8a8+lm_head", "fp8_per_channel+kv_fp8_static"),
    ),
    "moe": (
        *("bf16", "int8_w8a8", "int8_w8a16", "int4_w4a16", "int4_w4a16_g32"),
        *("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp4_w4a16", "nvfp4_w4a16"),
    ),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",  # it may round the scales of fp8 blocks to powers of two
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def model_config(family: str, tiny: bool) -> PretrainedConfig:
    """A Qwen3 whose widths every format can hold; logits far from uniform."""
    size: dict[str, Any] = {
        "vocab_size": 256 if tiny else 2048,
        "hidden_size": 128 if tiny else 512,
        "intermediate_size": 256 if tiny else 1536,
        "num_hidden_layers": 1 if tiny else 4,
        "num_attention_heads": 4 if tiny else 8,
        "num_key_value_heads": 2 if tiny else 4,
        "head_dim": 32 if tiny else 64,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": False,
        "initializer_range": 0.06,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "dense":
        return Qwen3Config(**size)
    inner = 128 if tiny else 256
    return Qwen3MoeConfig(
        **size, moe_intermediate_size=inner, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )


def random_prompts(vocabulary: int, count: int, length: int) -> list[Prompt]:
    """Prompts of any tokens but the special ones."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (count, length), generator=generator)
    return [Prompt(i, tuple(row)) for i, row in enumerate(ids.tolist())]


@torch.no_grad()
def prepared(config: PretrainedConfig, scheme: QuantScheme, device: torch.device, ids: Tensor) -> PreTrainedModel:
    """The learner's policy; a cache with calibrated scales is calibrated on ``ids``."""
    policy = load_model(config, dtype=torch.float32, seed=0).to(device)  # type: ignore[arg-type]
    prepare_kv_(policy, scheme)
    if scheme.quantizes:
        prepare_(policy, scheme, export_dtype=DTYPE)
    if calibrates_kv(scheme):
        whole = torch.ones_like(ids, dtype=torch.bool)
        calibrate_kv_(Scorer(policy, 1.0, DTYPE), ids, whole, token_budget=8192)
    return policy


def export(policy: PreTrainedModel, scheme: QuantScheme, directory: Path) -> None:
    """What ``HFExport`` writes."""
    if scheme.quantizes:
        save_quantized(policy, scheme, directory, export_dtype=DTYPE)
        return
    weights = dict(export_weights(policy, scheme, export_dtype=DTYPE))
    policy.save_pretrained(directory, state_dict={n: t.contiguous() for n, t in weights.items()})


def engine_of(config: PretrainedConfig, scheme: QuantScheme, device: torch.device) -> TorchEngine:
    """An engine without weights yet."""
    return TorchEngineFactory(max_num_seqs=64)(EngineSpec(config, scheme, DTYPE, device, MAX_LEN, ()))


@torch.no_grad()
def engine_scores(engine: TorchEngine, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens 1 to T - 1 of each row, and the most likely token in each place: ``[B, T - 1]`` each."""
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).repeat(rows)
    kv = kv_rounding(engine.decoder.model, engine.spec.scheme)
    context = PackedContext([length] * rows, ids.device, kv)
    logits = engine.decoder.logits(engine.decoder(ids.flatten(), positions, context)).view(rows, length, -1)[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return logprobs, logits.argmax(-1)


def lqrl_scores(directory: Path, scheme: QuantScheme, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`engine_scores` of an engine that read ``directory``."""
    if scheme.quantizes:
        found, tensors = load_quantized(directory)
        engine = engine_of(full_precision_config(directory), found, ids.device)
    else:
        model = load_model(directory, dtype=DTYPE)
        engine, tensors = engine_of(model.config, scheme, ids.device), export_weights(model, scheme, export_dtype=DTYPE)
    engine.update_weights(tensors, policy_version=0)
    return engine_scores(engine, ids)


def vllm_scores(directory: Path, scheme: QuantScheme, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same from vLLM, on the GPU."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    llm = LLM(
        model=str(directory),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype="fp8" if calibrates_kv(scheme) else "auto",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=MAX_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2**28,  # other processes on this GPU would disturb a measured size
        seed=0,
    )
    prompts: Any = [{"prompt_token_ids": row} for row in ids.tolist()]
    params = VllmParams(max_tokens=1, temperature=1.0, prompt_logprobs=1, detokenize=False)
    logprobs, best = [], []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        places = list(zip(prompt["prompt_token_ids"], output.prompt_logprobs, strict=True))[1:]
        logprobs.append([scored[token].logprob for token, scored in places])
        best.append([next(token for token, entry in scored.items() if entry.rank == 1) for _, scored in places])
    return torch.tensor(logprobs), torch.tensor(best)


def measure(args: argparse.Namespace, family: str, name: str) -> dict[str, Any]:
    """One row of the table."""
    scheme, device = QuantScheme.preset(name), torch.device(args.device)
    config = model_config(family, args.tiny)
    prompts = random_prompts(config.vocab_size, args.prompts, 8)
    policy = prepared(config, scheme, device, torch.tensor([p.input_ids for p in prompts], device=device))
    engine = engine_of(policy.config, scheme, device)
    engine.update_weights(export_weights(policy, scheme, export_dtype=DTYPE), policy_version=0)
    groups = engine.generate(prompts, SamplingParams(max_tokens=args.tokens, ignore_eos=True), seed=0)
    ids = torch.tensor(
        [[*p.input_ids, *c.token_ids.tolist()] for p, g in zip(prompts, groups, strict=True) for c in g], device=device
    )
    sampled = slice(len(prompts[0].input_ids) - 1, None)  # places that predict a sampled token
    ours, best = (t[:, sampled].cpu() for t in engine_scores(engine, ids))
    whole = torch.ones_like(ids, dtype=torch.bool)
    plain = load_model(config, dtype=torch.float32, seed=0).to(device)  # type: ignore[arg-type]
    with torch.no_grad():
        learner = Scorer(policy, 1.0, DTYPE, kv_rounding(policy, scheme)).score(ids, whole)[:, 1:][:, sampled].cpu()
        unquantized = Scorer(plain, 1.0, DTYPE).score(ids, whole)[:, 1:][:, sampled].cpu()
    with tempfile.TemporaryDirectory() as folder:
        export(policy, scheme, Path(folder))
        del engine, plain
        scores = vllm_scores if args.peer == "vllm" else lqrl_scores
        theirs, their_best = (t[:, sampled].cpu() for t in scores(Path(folder), scheme, ids))
    gap = (theirs - ours).double()
    return {
        "tokens": gap.numel(),
        "mean": float(gap.abs().mean()),
        "max": float(gap.abs().max()),
        "k3": float((torch.expm1(gap) - gap).mean()),
        "argmax": float((best == their_best).float().mean()),
        "learner": float((learner - ours).abs().mean()),
        "format": float((unquantized - ours).abs().mean()),
    }


def run_case(args: argparse.Namespace, family: str, name: str) -> dict[str, Any]:
    """`measure` in a process of its own; ``error`` in one line if it fails."""
    command = [sys.executable, __file__, "--case", family, name, "--peer", args.peer, "--device", args.device]
    command += ["--prompts", str(args.prompts), "--tokens", str(args.tokens), *(["--tiny"] if args.tiny else [])]
    environment = {**ENVIRONMENT, **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {args.timeout} s"}
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if last[0].startswith("{"):
        return json.loads(last[0])
    lines = [text.strip() for text in done.stderr.splitlines() if text.strip()]
    return {"error": f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"}


def run_here(args: argparse.Namespace) -> None:
    """The case of ``args``, as one JSON object on the last line."""
    try:
        row = measure(args, *args.case)
    except Exception as error:  # whatever vLLM raises is the row's text
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = " ".join(str(cause).split()) or "without a message"
        row = {"error": f"{type(cause).__name__}: {text[:300]}"}
    print(f"\n{json.dumps(row)}", flush=True)
    os._exit(0)  # vLLM's threads may hang at exit


def line(family: str, name: str, row: dict[str, Any]) -> str:
    """A row as text."""
    start = f"{family:5} {name:29}"
    if "error" in row:
        return f"{start} not loaded: {row['error']}"
    return (
        f"{start} {row['tokens']:6d} {row['mean']:9.2e} {row['max']:9.2e} {row['k3']:9.2e} {row['argmax']:7.1%} "
        f"{row['learner']:9.2e} {row['format']:9.2e}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", help="instead of the usual ones")
    parser.add_argument("--families", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--peer", default="vllm", choices=["vllm", "lqrl"], help="who reads the checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--tokens", type=positive, default=56)
    parser.add_argument("--jobs", type=positive, default=4, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one format")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        run_here(args)
    cases = [(family, name) for family in args.families for name in args.formats or FORMATS[family]]
    print(f"{args.peer} reads, {args.device}, torch {torch.__version__}, {args.prompts} x {args.tokens} sampled tokens")
    print(f"{'':5} {'format':29} {'tokens':>6} {'mean':>9} {'max':>9} {'k3':>9} {'argmax':>7}", end=" ")
    print(f"{'learner':>9} {'format':>9}", flush=True)
    started = time.perf_counter()
    with ThreadPoolExecutor(args.jobs) as pool:
        for case, row in zip(cases, pool.map(lambda case: run_case(args, *case), cases), strict=True):
            print(line(*case, row), flush=True)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
