"""The learner: its forward is the engine's policy, and its gradient does not depend on how it was computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import lightning as L
import pytest
import torch
from runs import ACCELERATOR, DEVICE, make_data, make_module, make_trainer, weights

from lqrl.algorithms import RLOO, GSPOLoss, KLPenalty, NoCorrection, SequenceTIS, TBPOLoss, TokenTIS
from lqrl.callbacks import ClipRangeScheduler, EngineRefresh, HFExport, SamplerFeedback
from lqrl.engines import TorchEngine, TorchEngineFactory
from lqrl.engines.base import EngineSpec
from lqrl.fabric import fit as fabric_fit
from lqrl.learner.refresh import refresh_engines
from lqrl.learner.update import accumulate_gradients, score
from lqrl.modeling.arithmetic import Arithmetic, RoundedRMSNorm, WideRotary
from lqrl.quant import HadamardRotation, Lora, UpdateAwareScaling
from lqrl.rollouts import Refill, to_train_batch
from lqrl.types import Advantages, ClipRange


def built(**options):
    module = make_module(**options)
    module.configure_model()
    module.to(DEVICE)
    module.build_engines(DEVICE)
    refresh_engines(module)
    return module


def rolled_out(module, prompts=6):
    data = make_data()
    data.setup("fit")
    return module.collect([data.train_prompts[i] for i in range(prompts)])


@pytest.mark.parametrize(
    ("scheme", "aligned", "limit"),
    [("none", True, 1e-9), ("int8_w8a8", True, 1e-5), ("int8_w8a8", False, 1e-3)],
)
def test_the_learner_scores_as_the_engine_sampled(scheme, aligned, limit):
    module = built(scheme=scheme, aligned=aligned)
    batch = rolled_out(module).batch.to(DEVICE)
    with torch.no_grad():
        logprobs = module(batch.input_ids, batch.attention_mask)
    gap = (logprobs - batch.rollout_logprobs)[batch.completion_mask].double()
    k3 = float((torch.expm1(gap) - gap).mean())
    assert k3 < limit
    assert float(gap.exp().mean()) == pytest.approx(1, abs=5e-3)
    if not aligned:
        assert k3 > 1e-6  # quantization is there, and it is the alignment that removes it


@dataclass(frozen=True)
class OtherRounding(TorchEngineFactory):
    """The embedded engine, said to round elsewhere."""

    def __call__(self, spec: EngineSpec) -> TorchEngine:
        engine = super().__call__(spec)
        engine.arithmetic = Arithmetic(rounds_normed=False, rounds_rotated=False, rounds_logits=True)
        return engine


@pytest.mark.parametrize("scheme", ["none", "int8_w8a8"])
def test_an_aligned_learner_and_its_reference_round_where_the_engine_does(scheme):
    def changed(**options):
        module = built(scheme=scheme, dtype="bfloat16", kl=KLPenalty(0.1), **options)
        scorers = (module.scorer, module._reference[0])
        return module, [sum(isinstance(m, (RoundedRMSNorm, WideRotary)) for m in s.modules()) for s in scorers]

    module, (learner, reference) = changed(engine=OtherRounding())
    assert learner == reference > 1
    assert not module.scorer.rounds_logits  # docs/vllm.md says why
    batch = rolled_out(module).batch.to(DEVICE)
    with torch.no_grad():
        scores = [s.score(batch.input_ids, batch.attention_mask) for s in (module.scorer, module._reference[0])]
    assert torch.equal(*scores) == (scheme == "none")
    assert changed(engine=OtherRounding(), aligned=False)[1] == [0, 0]
    assert changed(engine=OtherRounding(), exact=True)[1] == [0, 0]
    assert changed()[1] == [0, 0]


def test_columns_without_a_sampled_token_hold_zero():
    module = built()
    batch = rolled_out(module).batch.to(DEVICE)
    logprobs = module(batch.input_ids, batch.attention_mask)
    assert torch.all(logprobs[:, 0] == 0)
    assert torch.all(logprobs[~batch.attention_mask] == 0)
    assert torch.all(logprobs[batch.completion_mask] < 0)


def test_temperature_is_read_by_engine_and_learner_alike():
    from lqrl.types import SamplingParams

    module = built(scheme="none", sampling=SamplingParams(temperature=0.7, max_tokens=12))
    batch = rolled_out(module).batch.to(DEVICE)
    with torch.no_grad():
        gap = (module(batch.input_ids, batch.attention_mask) - batch.rollout_logprobs)[batch.completion_mask]
    assert float(gap.abs().max()) < 1e-4


def test_truncated_sampling_compares_like_with_like():
    from lqrl.types import SamplingParams

    module = built(scheme="none", sampling=SamplingParams(top_p=0.9, max_tokens=12))
    batch = rolled_out(module).batch.to(DEVICE)
    with torch.no_grad():
        logprobs = module(batch.input_ids, batch.attention_mask)
    gap = (logprobs - batch.rollout_logprobs - batch.rollout_log_mass)[batch.completion_mask]
    assert float(gap.abs().max()) < 1e-4
    assert float(batch.rollout_log_mass.min()) < 0  # something was cut


def gradients(module, batch, token_budget):
    module.zero_grad()
    accumulate_gradients(
        module, batch, module.objective(), clip_range=module.clip_range, token_budget=token_budget,
        backward=lambda loss: loss.backward(), anchor=lambda: torch.zeros((), requires_grad=True),
    )  # fmt: skip
    return {n: p.grad.clone() for n, p in module.policy.named_parameters()}


def test_rows_that_begin_late_are_scored_to_their_end():
    module = built(scheme="none")
    rollouts = rolled_out(module)
    rows = len(rollouts.batch)
    batch = to_train_batch(rollouts.batch, Advantages(torch.ones(rows), torch.ones(rows, dtype=torch.bool))).to(DEVICE)
    scored = score(module.scorer.score, batch, token_budget=60)
    room = torch.zeros_like(batch.input_ids[:, :3])
    late = {
        name: torch.cat([room.to(value.dtype), value], 1)
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor) and value.dim() == 2
    }
    moved = score(module.scorer.score, replace(batch, **late), token_budget=60)
    torch.testing.assert_close(moved[:, 3:], scored, rtol=1e-4, atol=1e-5)
    assert float(scored[batch.loss_mask].max()) < 0


@pytest.mark.parametrize("options", [{}, {"loss": GSPOLoss(), "correction": SequenceTIS()}], ids=["clipped", "gspo"])
def test_the_gradient_does_not_depend_on_micro_batches(options):
    module = built(scheme="none", **options)
    rollouts = rolled_out(module)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(len(rollouts.batch), generator=generator)
    batch = to_train_batch(rollouts.batch, Advantages(values, torch.ones(len(values), dtype=torch.bool))).to(DEVICE)
    whole, parts = gradients(module, batch, 10_000), gradients(module, batch, 60)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-7)


def test_aligned_and_plain_learners_have_nearby_gradients():
    batch = None
    found = []
    for aligned in (True, False):
        module = built(aligned=aligned)
        if batch is None:
            rollouts = rolled_out(module)
            batch, _ = module.learn_from(rollouts)
        found.append(gradients(module, batch, 10_000))
    for name, gradient in found[0].items():
        cosine = torch.cosine_similarity(gradient.flatten(), found[1][name].flatten(), 0)
        assert float(cosine) > 0.98, name


@pytest.mark.skipif(ACCELERATOR != "cpu", reason="a GPU's backward kernels need not repeat their bits")
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"exact": True}], ids=["fp32", "bf16", "exact"])
def test_activation_checkpointing_changes_no_bit_of_an_iteration(options):
    found = []
    for checkpointing in (True, False):
        module = built(activation_checkpointing=checkpointing, num_minibatches=2, **options)
        batch, _ = module.learn_from(rolled_out(module))
        assert module.policy.model.layers[0].gradient_checkpointing is checkpointing
        found.append((batch.old_logprobs, gradients(module, batch, 120)))
    assert (found[0][0] is None) == (found[1][0] is None) == ("exact" in options)
    assert "exact" in options or torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], gradient) for name, gradient in found[1][1].items())


ALGORITHMS = {
    "kl_penalty": {"kl": KLPenalty(1e-2)},
    "gspo": {"loss": GSPOLoss(), "correction": TokenTIS(acr=False), "num_minibatches": 2},
    "tbpo": {"loss": TBPOLoss(), "correction": NoCorrection()},
    "rloo_sequence_tis": {"advantage": RLOO(), "correction": SequenceTIS()},
    "refill": {"refill": Refill(max_rounds=2)},
    "bf16_compute": {"dtype": "bfloat16"},
    "bf16_masters": {"dtype": "bfloat16", "master_dtype": "bfloat16"},
    "full_precision_validation": {"validate_full_precision": True},
    "rotated_fp4_both_ways": {
        "scheme": "nvfp4_w4a4+kv_fp8",
        "transforms": [HadamardRotation()],
        "backward": "dequantized",
    },
}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_piece_trains(name, tmp_path):
    module = make_module(**ALGORITHMS[name])
    module.configure_model()
    before = weights(module)
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit(module, make_data())
    after = weights(module)
    assert any(not torch.equal(after[n], before[n]) for n in before)
    assert all(bool(t.isfinite().all()) for t in after.values())
    metrics = trainer.callback_metrics
    assert float(metrics["train/skipped_steps"]) == 0
    assert ("val_full/pass@1" in metrics) == (name == "full_precision_validation")
    assert ("kl/ref_k3" in metrics) == (name == "kl_penalty")


def test_a_clip_range_schedule_moves_the_clip_range(tmp_path):
    schedule = ClipRangeScheduler(ClipRange(0.1, 0.1), ClipRange(0.2, 0.4), 4, cap_start=1.0, cap_end=3.0)
    module = make_module()
    make_trainer(tmp_path, epochs=1, callbacks=[EngineRefresh(), SamplerFeedback(), schedule]).fit(module, make_data())
    # Iterations 0, 1, 2 of 4: halfway in the last one.
    assert (module.clip_range.low, module.clip_range.high) == (pytest.approx(0.15), pytest.approx(0.25))
    assert module.correction.cap == pytest.approx(2.0)


def test_the_export_is_the_trained_policy(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = make_module(transforms=[UpdateAwareScaling(1.5)])
    export = HFExport(str(tmp_path / "hf"))
    make_trainer(tmp_path, epochs=1, callbacks=[EngineRefresh(), SamplerFeedback(), export]).fit(module, make_data())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("1 2 3=6:")["input_ids"] == module.tokenizer("1 2 3=6:")["input_ids"]
    ids = torch.tensor([module.tokenizer("3 7 12=45:")["input_ids"]])
    expected = torch.log_softmax(model(ids).logits, -1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    plain = make_module(scheme="none", model=str(tmp_path / "hf"))
    plain.configure_model()
    ours = plain(ids, torch.ones_like(ids, dtype=torch.bool))[:, 1:]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_fabric_loop_is_the_same_iteration(tmp_path):
    trained = make_module()
    make_trainer(tmp_path / "trainer", epochs=2, limit_val_batches=0).fit(trained, make_data())
    fabric = L.Fabric(accelerator=ACCELERATOR, devices=1)
    seen = []
    module = fabric_fit(fabric, make_module(), make_data(), iterations=6, log=lambda i, m: seen.append((i, m)))
    assert [i for i, _ in seen] == list(range(6))
    expected = weights(trained)
    assert all(torch.equal(t, expected[n]) for n, t in weights(module).items())


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_the_fabric_loop_refuses_what_would_part_learner_and_engine(precision):
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    with pytest.raises(ValueError, match="leave it at 32-true"):
        fabric_fit(fabric, make_module(), make_data(), iterations=1)


def test_the_fabric_loop_refuses_more_minibatches_than_rows():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match=r"num_minibatches is 33, but an iteration has 32 rows on a rank"):
        fabric_fit(fabric, make_module(num_minibatches=33), make_data(), iterations=1)


def test_the_fabric_loop_resumes_exactly(tmp_path):
    whole = fabric_fit(L.Fabric(accelerator=ACCELERATOR, devices=1), make_module(), make_data(), iterations=5)
    path = tmp_path / "state.ckpt"
    for iterations in (2, 5):
        fabric = L.Fabric(accelerator=ACCELERATOR, devices=1)
        module = fabric_fit(fabric, make_module(), make_data(), iterations=iterations, checkpoint=path)
    expected = weights(whole)
    assert all(torch.equal(t, expected[n]) for n, t in weights(module).items())


def gap_after(module, change) -> float:
    """Difference of learner and engine on what is sampled after a change and a refresh that is not asked to hurry."""
    assert refresh_engines(module) is None  # the engine holds these weights
    change(module.policy.model.layers[0].mlp.up_proj)
    assert refresh_engines(module) is not None
    batch = rolled_out(module).batch.to(DEVICE)
    with torch.no_grad():
        scores = module(batch.input_ids, batch.attention_mask)
    return float((scores - batch.rollout_logprobs)[batch.completion_mask].abs().max())


def replaced(layer) -> None:
    layer.weight = torch.nn.Parameter(-layer.weight.detach())


def written_behind_its_back(layer) -> None:
    layer.weight.data.mul_(-1)
    layer.invalidate()


@pytest.mark.parametrize("change", [replaced, written_behind_its_back])
@pytest.mark.parametrize("options", [{"scheme": "int8_w8a8"}, {"scheme": "int8_w8a8", "lora": Lora(r=4, alpha=8)}])
def test_a_refresh_follows_weights_that_no_optimizer_wrote(change, options):
    assert gap_after(built(**options), change) < 0.1


def test_a_policy_that_did_not_change_is_not_sent_again():
    module = built(scheme="int8_w8a8")
    module.shipped.clear()
    assert refresh_engines(module) is not None
    assert refresh_engines(module) is None
