"""A learner's fused layers: their kernels interpreted and compiled, and whole decoders with and without them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from gradient_cases import CHECKS, outcome
from interpreter import needs_triton
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from lqrl.algorithms import ClippedLoss, TokenTIS
from lqrl.learner.scorer import Scorer
from lqrl.learner.update import Objective, accumulate_gradients
from lqrl.modeling import varlen
from lqrl.modeling.attention import PackedContext
from lqrl.modeling.backbone import load_model
from lqrl.modeling.exact import exact_learner_
from lqrl.modeling.fused import fuse_layers_
from lqrl.quant import QuantScheme, prepare_
from lqrl.types import ClipRange, TrainBatch

CASES = Path(__file__).with_name("gradient_cases.py")
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, tuple[PreTrainedConfig, int]] = {  # and modules that are changed
    "llama": (LlamaConfig(**SIZES), 2 * 4 + 1),
    "mistral": (MistralConfig(**SIZES, sliding_window=6), 2 * 4 + 1),
    "qwen2": (Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}), 2 * 4 + 1),
    "qwen3": (Qwen3Config(**SIZES), 2 * 6 + 1),
    "qwen3_moe": (
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0]),
        2 * 6,
    ),
}
LENGTHS = [9, 1, 20, 14]


@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_interpreted_kernels_give_the_gradients_of_autograd(name, interpreted):
    assert interpreted[name] is None, interpreted[name]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("name", list(CHECKS))
def test_compiled_kernels_give_the_gradients_of_autograd(name):
    CHECKS[name](torch.device("cuda"))


@pytest.mark.parametrize("name", list(MODELS))
def test_on_the_cpu_the_layers_are_those_of_transformers(name: str) -> None:
    config, modules = MODELS[name]
    policy = load_model(config, dtype=torch.float32, seed=0)
    plain = outcome(policy, LENGTHS, torch.float32)
    assert fuse_layers_(policy) == modules
    assert fuse_layers_(policy) == 0
    for each in (policy, copy.deepcopy(policy)):
        found = outcome(each, LENGTHS, torch.float32)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[key], plain[key]) for key in plain)


def test_modules_of_an_exact_learner_are_left_alone() -> None:
    policy = load_model(MODELS["qwen3"][0], dtype=torch.float32, seed=0)
    exact_learner_(policy, torch.float32)
    changed = fuse_layers_(policy)
    assert changed == 2 * 2  # attention and gated SiLU, which call what is exact
    assert not any("forward" in vars(m) for n, m in policy.named_modules() if n.endswith("norm"))


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("scheme", ["none", "int8_w8a16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_fused_layers_compute_what_transformers_computes(
    name: str, scheme: str, dtype: torch.dtype, bound: float
) -> None:
    device = torch.device("cuda")
    wide = load_model(MODELS[name][0], dtype=torch.float32, device=device, seed=0)
    policy = load_model(MODELS[name][0], dtype=dtype, device=device, seed=0)
    policy.load_state_dict(wide.state_dict())
    if scheme != "none":
        for model in (wide, policy):
            prepare_(model, QuantScheme.preset(scheme), export_dtype=dtype)
    wanted = outcome(wide, LENGTHS, torch.float32)
    plain = outcome(policy, LENGTHS, dtype)
    fuse_layers_(policy)
    found = outcome(policy, LENGTHS, dtype)
    for key, true in wanted.items():
        size = true.abs().max()
        usual, fused = ((x[key].float() - true).abs().max() / size for x in (plain, found))
        assert fused <= max(bound, 2 * usual), (key, float(usual), float(fused))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_packed_attention_without_padding(heads: tuple[int, int], window: int | None) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    lengths, width = [300, 1, 77, 128], 64
    q, k, v = (
        torch.randn(1, n, sum(lengths), width, device=device, dtype=dtype, requires_grad=True)
        for n in (heads[0], heads[1], heads[1])
    )
    assert varlen.serves(q, k, v), "torch's kernel should work here"
    seed = torch.randn(1, sum(lengths), heads[0], width, device=device, dtype=dtype)
    packed = PackedContext(lengths, device).attend(0, q, k, v, width**-0.5, window)
    apart = [
        PackedContext([a.shape[2]], device).attend(0, a, b, c, width**-0.5, window)
        for a, b, c in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    ]
    found, wanted = ((out, *torch.autograd.grad(out, (q, k, v), seed)) for out in (packed, torch.cat(apart, 1)))
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        # With one key to see, queries and keys have no gradient but what rounding leaves.
        size = 1e-3 if window == 1 and place in (1, 2) else b.float().abs().max()
        assert (a.float() - b.float()).abs().max() <= 2e-2 * size


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("scheme", ["none", "int8_w8a8"])
def test_micro_batches_do_not_wait_for_the_gpu(scheme: str) -> None:
    device, dtype, rows = torch.device("cuda"), torch.bfloat16, 12
    policy = load_model(MODELS["qwen3"][0], dtype=dtype, device=device, seed=0)
    if scheme != "none":
        prepare_(policy, QuantScheme.preset(scheme), export_dtype=dtype)
    fuse_layers_(policy)
    generator = torch.Generator().manual_seed(1)
    ends = torch.randint(5, 30, (rows, 1), generator=generator)
    columns = torch.arange(30)
    trained = (columns >= 3) & (columns < ends)
    batch = TrainBatch(
        input_ids=torch.randint(96, (rows, 30), generator=generator),
        attention_mask=columns < ends,
        loss_mask=trained,
        advantages=torch.randn(rows, 30, generator=generator) * trained,
        rollout_logprobs=-torch.rand(rows, 30, generator=generator) * trained,
        rollout_log_mass=torch.zeros(rows, 30),
        group_ids=torch.arange(rows),
    ).to(device)

    def waits(token_budget: int) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                accumulate_gradients(
                    Scorer(policy, 1.0, dtype).score,
                    batch,
                    Objective(ClippedLoss(), TokenTIS()),
                    clip_range=ClipRange(),
                    token_budget=token_budget,
                    backward=lambda loss: loss.backward(),
                    anchor=lambda: torch.zeros((), device=device),
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)

    waits(40)  # what is tried once, and compiled
    assert waits(40) == waits(1000)
