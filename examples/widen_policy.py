"""Write the shipped policy with heads of 32, which vLLM's CPU attention has kernels for; it computes the same.

    python examples/widen_policy.py models/countdown
    lqrl fit --config configs/quickstart.yaml --model.init_args.model models/countdown \
        --model.init_args.engine lqrl.engines.vllm.VLLMEngineFactory
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lqrl.modeling.backbone import load_model
from lqrl.modeling.sources import load_tokenizer, resolve_source

POLICY = "asset:countdown_policy"


@torch.no_grad()
def widened(policy: PreTrainedModel) -> PreTrainedModel:
    """The same function with heads twice as wide, half of them zeros.

    Rotary pair i of 8 turns with theta ** -(i / 8), which is that of pair 2 i of 16. A norm over twice the width, half
    of it zeros, gives values sqrt(2) times as large; scores are divided by sqrt(32) instead of sqrt(16).
    """
    config = copy.deepcopy(policy.config)
    old, config.head_dim = config.head_dim, 2 * config.head_dim
    place = torch.cat([torch.arange(0, old, 2), torch.arange(old, 2 * old, 2)])
    wider = load_model(config, dtype=torch.float32, seed=0)
    for (name, target), source in zip(wider.named_parameters(), policy.parameters(), strict=True):
        last = name.split(".")[-2]
        if last in ("q_proj", "k_proj", "v_proj"):
            target.zero_().unflatten(0, (-1, 2 * old))[:, place] = source.unflatten(0, (-1, old))
        elif last == "o_proj":
            target.zero_().unflatten(1, (-1, 2 * old))[:, :, place] = source.unflatten(1, (-1, old))
        elif last in ("q_norm", "k_norm"):
            target[place] = source * (1 if last == "q_norm" else 0.5**0.5)
        else:
            target.copy_(source)
    return wider


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    widened(load_model(resolve_source(POLICY), dtype=torch.float32)).save_pretrained(folder)
    load_tokenizer(POLICY).save_pretrained(folder)


if __name__ == "__main__":
    main()
