"""`PolicyModule`: the learner. One `training_step` is one iteration of reinforcement learning."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lqrl.algorithms import GRPO, AdvantageFn, ClippedLoss, Correction, KLPenalty, PolicyLoss, TokenTIS
from lqrl.data.budget import RolloutBudget, UniformBudget
from lqrl.data.datamodule import prompt_data
from lqrl.engines.base import EngineFactory, RolloutEngine
from lqrl.learner.checkpoint import check_checkpoint, learner_state, restore_learner
from lqrl.learner.frozen import SentOnce, without_frozen
from lqrl.learner.kv_scales import CALIBRATION_PROMPTS, calibrate
from lqrl.learner.options import check_options, check_run
from lqrl.learner.policy import build_engine, build_policy, build_reference, build_scorer, engine_spec
from lqrl.learner.scorer import Scorer
from lqrl.learner.seeds import derive_seed
from lqrl.learner.update import (
    Backward,
    Forward,
    NoSync,
    Objective,
    Watch,
    fresh_rows,
    score,
    step_schedule,
    sum_ratios,
    update_policy,
)
from lqrl.learner.validation import Validation
from lqrl.modeling.precision import parse_dtype
from lqrl.modeling.sources import load_tokenizer
from lqrl.phases import phase
from lqrl.quant import BackwardMode, InvariantTransform, Lora, QuantScheme, export_weights
from lqrl.quant.kv import calibrates_kv
from lqrl.rewards import RewardSum
from lqrl.rollouts import Refill, Rollouts, check_fresh, collect, rollout_metrics, speed_metrics, to_train_batch
from lqrl.rollouts.collect import Beliefs, DrawMore
from lqrl.types import ClipRange, Prompt, PromptBatch, Ratio, SamplingParams, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHOWN = {"reward": "rollout/reward", "mismatch_kl": "mismatch/k3", "tokens_per_s": "speed/rollout_tokens_per_second"}


class PolicyModule(L.LightningModule):
    """A causal language model trained with RL on rollouts of a (quantized) engine.

    Subclass it and override one step: `collect`, `learn_from`, `objective`, `optimize`, or `forward`.

    Args:
        model: directory, hub name, or ``asset:countdown_policy`` (shipped with the package).
        reward: what is rewarded, term by term.
        engine: builds the rollout engine.
        scheme: low-bit format that engine and learner share, by preset name or as a value; ``none`` is full precision.
        aligned: the learner's forward computes with the engine's low-bit numbers (QaRL) and rounds where it does;
            ``false`` leaves it in full precision.
        dtype: compute and export dtype; ``master_dtype`` is that of the parameters and the optimizer.
        master_dtype: see ``dtype``.
        advantage, correction, loss, kl: the algorithm; each a value, each usable with every other.
        clip_range: clip widths of the policy ratio; `ClipRangeScheduler` may change them.
        sampling: temperature, length and truncation of the rollouts, read by engine and learner alike.
        budget: completions of each prompt.
        refill: DAPO's dynamic sampling, off by default.
        optimizer, lr_scheduler: as callables of the parameters and of the optimizer; the schedule counts iterations.
        max_grad_norm: clip gradients to this global norm; ``None`` does not.
        num_minibatches, num_epochs: an iteration has ``num_minibatches * num_epochs`` optimizer steps; a single one is
            on-policy and saves the proximal pass, as fresh rollouts in exact mode do.
        token_budget: most real tokens of one forward and backward pass, in which a longer sequence runs alone.
        lora: train adapters on a frozen base (QeRL) instead of all parameters; checkpoints hold the adapters alone.
        transforms: invariant transforms, folded once after loading, such as UAQ (QuRL) or a Hadamard rotation.
        backward: operands of the aligned layers' backward products, see `lqrl.quant.AlignedLinear`.
        max_staleness: how many versions the engine may lag, and the oldest token of a rollout.
        val_samples: completions of each validation prompt.
        validate_full_precision: also validate with unquantized weights, logged as ``val_full/*``.
        seed: of rollouts and shuffles.
        exact: engine and learner give every sampled token the same log-prob, as bits, in any batch (docs/exact.md).
        activation_checkpointing: keep a layer's input alone and compute the rest again in the backward pass.
    """

    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: RolloutEngine

    def __init__(
        self,
        model: str,
        reward: RewardSum,
        engine: EngineFactory,
        scheme: str | QuantScheme = "int8_w8a8",
        aligned: bool = True,
        dtype: str = "float32",
        master_dtype: str = "float32",
        advantage: AdvantageFn = GRPO(),
        correction: Correction = TokenTIS(),
        loss: PolicyLoss = ClippedLoss(),
        kl: KLPenalty | None = None,
        clip_range: ClipRange = ClipRange(),
        sampling: SamplingParams = SamplingParams(),
        budget: RolloutBudget = UniformBudget(8),
        refill: Refill | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        max_grad_norm: float | None = 1.0,
        num_minibatches: int = 1,
        num_epochs: int = 1,
        token_budget: int = 16384,
        lora: Lora | None = None,
        transforms: Sequence[InvariantTransform] = (),
        backward: BackwardMode = "high_precision",
        max_staleness: int = 0,
        val_samples: int = 8,
        validate_full_precision: bool = False,
        seed: int = 0,
        exact: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_name = model
        self.reward, self.engine_factory = reward, engine
        self.scheme, self.aligned = QuantScheme.parse(scheme), aligned
        self.compute_dtype, self.master_dtype = parse_dtype(dtype), parse_dtype(master_dtype)
        self.advantage, self.correction, self.loss, self.kl = advantage, correction, loss, kl
        self.clip_range, self.sampling, self.budget, self.refill = clip_range, sampling, budget, refill
        self.optimizer, self.lr_scheduler, self.max_grad_norm = optimizer, lr_scheduler, max_grad_norm
        self.num_minibatches, self.num_epochs, self.token_budget = num_minibatches, num_epochs, token_budget
        self.lora, self.transforms, self.max_staleness = lora, tuple(transforms), max_staleness
        self.backward_mode: BackwardMode = backward
        self.val_samples, self.validate_full_precision = val_samples, validate_full_precision
        self.seed, self.exact, self.activation_checkpointing = seed, exact, activation_checkpointing
        check_options(self)
        self.policy_version, self.iteration = 0, 0
        self.last_rollouts: Rollouts | None = None
        self.draw_more: DrawMore | None = None
        self.beliefs: Beliefs | None = None
        self.watch: Watch | None = None
        self.calibration_prompts: Sequence[Prompt] = ()
        self.shipped: dict[str, tuple[object, ...]] = {}
        self.sent_once: SentOnce | None = None
        self.full_engine: RolloutEngine | None = None
        self._scorer: list[Scorer] = []  # lists keep a second name of the policy, and the reference, out of state_dict
        self._reference: list[Scorer] = []
        self.validation = Validation(["val", "val_full"] if validate_full_precision else ["val"], val_samples)

    # ---------------------------------------------------------------- building

    def configure_model(self) -> None:
        """Load the tokenizer and build the policy, once; see `lqrl.learner.policy.build_policy`."""
        if self._scorer:
            return
        self.policy, self.tokenizer = build_policy(self), load_tokenizer(self.model_name)
        self._scorer = [build_scorer(self)]

    def build_engines(self, device: torch.device) -> None:
        """Build the rollout engine, the full-precision one if validation asks for it, and the reference policy."""
        self.configure_model()
        if "engine" in vars(self):
            return
        self.engine = build_engine(self, device)
        if self.validate_full_precision:
            self.full_engine = self.engine_factory(engine_spec(self, device, full_precision=True))
        if self.kl is not None:
            self._reference = [build_reference(self, device)]

    @property
    def scorer(self) -> Scorer:
        """The learner's forward pass."""
        return self._scorer[0]

    @property
    def sends_adapters(self) -> bool:
        """Whether the rollout engine holds adapters beside the base, rather than merged weights."""
        return self.lora is not None and self.lora.refresh == "adapter"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: the tokenizer's EOS and those of the model's generation config."""
        declared: Any = self.policy.generation_config.eos_token_id
        ids = [declared] if isinstance(declared, int) else list(declared or [])
        return tuple(dict.fromkeys([*ids, cast(int, self.tokenizer.eos_token_id)]))

    def setup(self, stage: str) -> None:
        """Build what needs the device (Lightning hook).

        Raises:
            ValueError: when Trainer, data and options do not fit, see `lqrl.learner.options.check_run`.
        """
        check_run(self, stage)
        self.build_engines(self.trainer.strategy.root_device)
        if calibrates_kv(self.scheme):
            self.calibration_prompts = prompt_data(self.trainer).first_prompts(CALIBRATION_PROMPTS)
        if stage == "fit":
            data = prompt_data(self.trainer)
            self.beliefs = data.beliefs
            self.draw_more = data.refill if self.refill is not None else None

    # ---------------------------------------------------------------- forward

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The aligned forward.

        Args:
            input_ids: ``[B, T]``, right-padded.
            attention_mask: ``[B, T]`` bool.

        Returns:
            ``[B, T]`` float32 log-probs under the sampling temperature; column 0 and padding hold 0.
        """
        return self.scorer.score(input_ids, attention_mask)

    # ---------------------------------------------------------------- one iteration

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Roll out, credit, learn; the README's table, line by line."""
        rollouts = self.collect(batch.prompts)
        train_batch, credit = self.learn_from(rollouts)
        model: Any = self.trainer.model
        learned = self.optimize(
            train_batch,
            forward=self,
            optimizer=self.optimizers(),
            backward=self.manual_backward,
            no_sync=model.no_sync if isinstance(model, nn.parallel.DistributedDataParallel) else contextlib.nullcontext,
        )
        self.finish_iteration(rollouts)
        step_schedule(self.lr_schedulers())
        metrics = {
            **sum_ratios([rollout_metrics(rollouts)], self.device),
            **credit,
            **learned,
            **speed_metrics(rollouts),
        }
        self.log_dict(metrics, on_step=True, on_epoch=False, batch_size=len(batch))
        self.log_dict(
            {short: metrics[name] for short, name in SHOWN.items() if name in metrics},
            prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=len(batch),
        )  # fmt: skip

    def collect(self, prompts: Sequence[Prompt]) -> Rollouts:
        """Generate and score completions of ``prompts`` with an engine that is checked to be fresh."""
        check_fresh(self.engine, self.policy_version, self.max_staleness)
        return collect(
            self.engine,
            prompts,
            self.sampling,
            self.reward,
            decode=self.decode,
            budget=self.budget,
            pad_token_id=self.pad_token_id,
            seed=derive_seed(self.seed, "rollout", self.iteration),
            refill=self.refill,
            draw_more=self.draw_more,
            beliefs=self.beliefs,
            oldest_version=self.policy_version - self.max_staleness,
        )

    def learn_from(self, rollouts: Rollouts) -> tuple[TrainBatch, dict[str, float]]:
        """Advantages, then the kept rows, scored by the proximal and reference policies where the loss asks for it."""
        for engine in filter(None, (self.engine, self.full_engine)):
            engine.sleep()  # until it is refreshed, or generates
        advantages = self.advantage(rollouts.batch)
        batch = to_train_batch(rollouts.batch, advantages).to(self.device)
        if not (self.on_policy or (self.exact and bool(fresh_rows(batch, self.policy_version).all()))):
            batch = replace(batch, old_logprobs=score(self, batch, token_budget=self.token_budget))
        if self.kl is not None:
            batch = replace(batch, ref_logprobs=score(self._reference[0], batch, token_budget=self.token_budget))
        credit = {n: Ratio(torch.tensor(v), torch.tensor(1.0)) for n, v in advantages.metrics.items()}
        return batch, sum_ratios([credit], self.device)

    @property
    def on_policy(self) -> bool:
        """Whether an iteration is one optimizer step, so that the old policy is the current one."""
        return self.num_minibatches == 1 and self.num_epochs == 1

    def objective(self) -> Objective:
        """What `optimize` minimises."""
        return Objective(self.loss, self.correction, self.kl)

    def optimize(
        self,
        batch: TrainBatch,
        *,
        forward: Forward,
        optimizer: Any,
        backward: Backward,
        no_sync: NoSync = contextlib.nullcontext,
    ) -> dict[str, float]:
        """All optimizer steps of one iteration; the same code under the Trainer and under Fabric.

        Returns:
            Metrics averaged over tokens, micro-batches, steps and ranks.
        """
        return update_policy(
            batch,
            self.objective(),
            forward=forward,
            optimizer=optimizer,
            backward=backward,
            no_sync=no_sync,
            parameters=list(self.policy.parameters()),
            clip_range=self.clip_range,
            token_budget=self.token_budget,
            num_minibatches=self.num_minibatches,
            num_epochs=self.num_epochs,
            max_grad_norm=self.max_grad_norm,
            seed=derive_seed(self.seed, "minibatch", self.iteration),
            watch=self.watch,
        )

    def finish_iteration(self, rollouts: Rollouts) -> None:
        """The policy has changed: a new version, a new iteration; and new cache scales, where they are calibrated."""
        self.last_rollouts = rollouts
        calibrate(self, rollouts.batch.input_ids, rollouts.batch.attention_mask)
        self.policy_version, self.iteration = self.policy_version + 1, self.iteration + 1

    # ---------------------------------------------------------------- validation

    @phase("validate")
    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """pass@1 and pass@k of the rollout engine, and of full-precision weights if asked for."""
        check_fresh(self.engine, self.policy_version, self.max_staleness)
        self._validate(self.engine, batch, "val")
        if self.full_engine is not None:
            check_fresh(self.full_engine, self.policy_version, self.max_staleness)
            self._validate(self.full_engine, batch, "val_full")

    def _validate(self, engine: RolloutEngine, batch: PromptBatch, kind: str) -> None:
        rollouts = collect(
            engine, batch.prompts, self.sampling, self.reward,
            decode=self.decode, budget=UniformBudget(self.val_samples), pad_token_id=self.pad_token_id,
            seed=derive_seed(self.seed, "validation"),
        )  # fmt: skip
        for name, metric in self.validation.update(kind, rollouts.batch).items():
            self.log(name, metric, prog_bar=kind == "val", batch_size=len(batch))

    def on_validation_epoch_end(self) -> None:
        """Say how it went; also before training, when Lightning's own loggers are silent."""
        scores = self.validation.finish(self.policy_version)
        self.print(f"version {self.policy_version}: " + ", ".join(f"{n} {v:.3f}" for n, v in scores.items()))
        if self.trainer.sanity_checking:
            for logger in self.trainer.loggers:
                logger.log_metrics(scores, step=0)

    # ---------------------------------------------------------------- pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens to text, special tokens left out."""
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def pad_token_id(self) -> int:
        """Fills padded columns; they are never computed."""
        pad = self.tokenizer.pad_token_id
        return pad if isinstance(pad, int) else self.eos_token_ids[0]

    def exported_weights(self, scheme: QuantScheme | None = None, skip: Collection[str] = ()) -> Any:
        """What an engine of ``scheme`` loads, adapters merged; by default what the rollout engine does."""
        wanted, apart = scheme or self.scheme, scheme is None and self.sends_adapters
        return export_weights(self.policy, wanted, export_dtype=self.compute_dtype, adapters=apart, skip=skip)

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer gets, with names: all of the policy's, or adapters and norms."""
        return [(name, p) for name, p in self.policy.named_parameters() if p.requires_grad]

    # ---------------------------------------------------------------- Lightning's hooks

    def configure_optimizers(self) -> Any:
        """The optimizer over the trained parameters and the schedule over iterations."""
        optimizer = self.optimizer(self.trained_parameters())
        if self.lr_scheduler is None:
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("lr_scheduler: ReduceLROnPlateau is not supported; use a schedule of the iteration")
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the parameters do not say: version, iteration, format, model; leave out what is frozen."""
        checkpoint["lqrl"] = learner_state(self)
        checkpoint["state_dict"] = without_frozen(self, checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model, and a fit in another format; then restore version and iteration."""
        self.configure_model()
        fitting = self._trainer if self._trainer is not None and self._trainer.state.fn == "fit" else None
        state = check_checkpoint(self, checkpoint, resumes=fitting is not None)
        if fitting is not None:
            prompt_data(fitting).restore(checkpoint)  # Lightning looks only under the very same class name
        restore_learner(self, state)
