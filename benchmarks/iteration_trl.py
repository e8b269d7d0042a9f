"""The side of `iteration.py` that is TRL: its GRPOTrainer with transformers' generate, or with vLLM in its process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from iteration_task import LEARNING_RATE, prompt_texts, reward
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class _Clock:
    """Seconds inside functions since the last `lap`."""

    def __init__(self, device: str) -> None:
        self._synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose calls are charged to ``name``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._synchronize()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self._synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return call

    def lap(self) -> dict[str, float]:
        """The seconds so far, with those of the whole lap as ``iteration``."""
        self._synchronize()
        ended = time.perf_counter()
        lap, self.seconds = self.seconds | {"iteration": ended - self._began}, {}
        self._began = ended
        return lap


class _Laps(TrainerCallback):
    """An iteration is what lies between two ends of optimizer steps."""

    def __init__(self, clock: _Clock) -> None:
        self.iterations: list[dict[str, float]] = []
        self._clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.lap()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self.iterations and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.iterations.append(self._clock.lap())


def train(case: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Seconds of each iteration and of its phases."""
    clock = _Clock(case["device"])
    laps = _Laps(clock)

    def chance(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward(ids) for ids in completion_ids]

    timed: Any = clock.timed("reward", chance)
    timed.__name__ = "chance"
    texts = prompt_texts(case["prompts"] * case["iterations"], case["prompt"])
    trainer: Any = GRPOTrainer(
        model=str(folder),
        reward_funcs=timed,
        args=_options(case, folder / "trl"),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[laps],
    )
    if case["learner"] == "trl-vllm":
        generation = trainer.vllm_generation
        generation.generate = clock.timed("generate", generation.generate)
    else:
        trainer.model.generate = clock.timed("generate", trainer.model.generate)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "step_time" in entry]
    for lap, entry in zip(laps.iterations, logged, strict=True):
        if entry["completions/min_length"] != case["tokens"]:
            raise RuntimeError(
                f"samples have {entry['completions/min_length']} tokens, {case['tokens']} were asked for"
            )
        lap["forward_backward"] = entry["step_time"] - lap["generate"] - lap["reward"]
        lap["step"] = lap["iteration"] - entry["step_time"]
    return laps.iterations


def _options(case: dict[str, Any], folder: Path) -> GRPOConfig:
    rows = case["prompts"] * case["samples"]
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5}
    return GRPOConfig(
        output_dir=str(folder),
        model_init_kwargs={"dtype": case["master"]},
        use_cpu=case["device"] == "cpu",
        bf16=case["dtype"] == "bfloat16",
        learning_rate=LEARNING_RATE,
        max_steps=case["iterations"],
        per_device_train_batch_size=case["trl_rows"],
        gradient_accumulation_steps=rows // case["trl_rows"],
        steps_per_generation=case["generation_batch"] // case["trl_rows"],
        num_generations=case["samples"],
        max_completion_length=case["tokens"],
        generation_kwargs={"min_tokens" if case["learner"] == "trl-vllm" else "min_new_tokens": case["tokens"]},
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **(vllm if case["learner"] == "trl-vllm" else {}),
    )
