"""Packed forward passes against transformers' own eager attention."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from lqrl.modeling.backbone import hidden_states, load_model, output_weight, pack
from lqrl.testing import tiny_config

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = [
    LlamaConfig(**SIZES),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES, head_dim=16),
    GemmaConfig(**SIZES, head_dim=8, tie_word_embeddings=True),
    MistralConfig(**SIZES, sliding_window=4),
    Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
]


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 48, (4, 10), generator=torch.Generator().manual_seed(0))
    return ids, torch.arange(10) < torch.tensor([[10], [3], [1], [7]])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_packed_logits_equal_transformers_eager(config: PretrainedConfig) -> None:
    model = load_model(config, dtype=torch.float32, seed=0).eval()
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    other.load_state_dict(model.state_dict())
    ids, mask = batch()
    packed = pack(ids, mask)
    with torch.no_grad():
        logits = hidden_states(model, packed) @ output_weight(model).T
        expected = other(input_ids=ids, attention_mask=mask.long()).logits.flatten(0, 1)[packed.index]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_pack_by_hand() -> None:
    packed = pack(torch.tensor([[5, 6, 0], [7, 8, 9], [0, 0, 0]]), torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]))
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert packed.index.tolist() == [0, 1, 3, 4, 5]  # flat places in [3, 3]; 2 and the last row are padding


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = load_model(LlamaConfig(**SIZES), dtype=torch.float32, seed=0).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        hidden_states(model, pack(*batch())).square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_seed_fixes_the_weights_and_leaves_the_global_generator() -> None:
    state = torch.get_rng_state()
    first, second, third = (load_model(LlamaConfig(**SIZES), dtype=torch.float32, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(output_weight(first), output_weight(second))
    assert not torch.equal(output_weight(first), output_weight(third))


def test_the_callers_config_is_not_changed() -> None:
    config = LlamaConfig(**SIZES)
    before = config.to_dict()
    load_model(config, dtype=torch.bfloat16)
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Gemma2Config(**SIZES, head_dim=8), "final_logit_softcapping=30.0"),
        (GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None), "s_aux"),
        (FalconConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4), "falcon: this"),
        (NemotronConfig(**SIZES, head_dim=8), "NemotronForCausalLM: .*it keeps attention_context from .*use a decoder"),
        (MptConfig(vocab_size=48, d_model=32, n_heads=4, n_layers=2), "MptForCausalLM: .*use a decoder"),
        (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "1 of 2 layers"),
    ],
    ids=lambda x: x.model_type if isinstance(x, PretrainedConfig) else "",
)
def test_architectures_that_cannot_be_packed_are_refused(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        load_model(config, dtype=torch.float32, seed=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**SIZES, attention_dropout=0.1), r"set config.attention_dropout=0.1 to 0$"),
        (
            Phi3Config(**SIZES, resid_pdrop=0.2, embd_pdrop=0.1),
            r"resid_attn_dropout and 3 more.*config.resid_pdrop=0.2",
        ),
        (
            GPTNeoXConfig(**SIZES, hidden_dropout=0.1),
            r"emb_dropout and .*set config.hidden_dropout=0.1 to 0$",
        ),
        (Starcoder2Config(**SIZES, residual_dropout=0.1), "set config.residual_dropout=0.1 to 0"),  # no module drops
        (MixtralConfig(**SIZES, num_local_experts=2, router_jitter_noise=0.1), "config.router_jitter_noise=0.1 to 0"),
    ],
    ids=lambda x: x.model_type if isinstance(x, PretrainedConfig) else "",
)
def test_what_would_drop_at_random_in_training_is_refused(config: PretrainedConfig, message: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=message):
        load_model(config, dtype=torch.float32, seed=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(**SIZES, classifier_dropout=0.1),  # of a head that a language model has not
        OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),  # draws, and keeps all
    ],
    ids=lambda c: c.model_type,
)
def test_dropout_that_is_off_is_none(config: PretrainedConfig) -> None:
    training = load_model(config, dtype=torch.float32, seed=0).train()
    first, second = (hidden_states(training, pack(*batch())) for _ in range(2))
    assert torch.equal(first, second)


def test_generate_without_a_context_says_what_to_call() -> None:
    model = load_model(LlamaConfig(**SIZES), dtype=torch.float32, seed=0).eval()
    with pytest.raises(RuntimeError, match="attn_implementation"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path) -> None:
    model = load_model(tiny_config("qwen3"), dtype=torch.float32, seed=0)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing \['model\.layers\.0\.mlp\.up_proj\.weight'\]"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_a_head_of_its_own_stays_one_whatever_the_config_says(tmp_path) -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    model = load_model(config, dtype=torch.float32, seed=0)
    head = torch.randn_like(output_weight(model))
    model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert torch.equal(output_weight(loaded), head)
    assert loaded.config.tie_word_embeddings is False


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        },
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_rotary_frequencies_that_follow_the_longest_sequence_are_refused(rope):
    with pytest.raises(NotImplementedError, match=f"'{rope['rope_type']}' follow the longest sequence of a call"):
        load_model(LlamaConfig(**SIZES, rope_parameters=rope), dtype=torch.float32, seed=0)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    load_model(LlamaConfig(**SIZES, rope_parameters=yarn), dtype=torch.float32, seed=0)
