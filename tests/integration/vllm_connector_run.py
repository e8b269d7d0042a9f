"""An engine whose caches a connector keeps as files, in a process of its own: vLLM has one connector a process."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm_models import build, weights_of

from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams

PROMPT, PARAMS = Prompt(1, tuple(5 + i % 50 for i in range(70))), SamplingParams(n=2, max_tokens=4)


class KeptFiles(ExampleConnector):
    """Drops what it keeps when it is told to."""

    def reset_cache(self) -> bool:
        """Remove the folder."""
        shutil.rmtree(self._storage_path, ignore_errors=True)
        return True


def main(folder: Path) -> None:
    """Write what the engine says under the weights of seed 1, then under those of seed 0."""
    transfer = {
        "kv_connector": "KeptFiles",
        "kv_connector_module_path": Path(__file__).stem,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kept")},
    }
    engine, said = build(engine_args={"kv_transfer_config": transfer, "block_size": 32}), []  # two are full
    for version, seed in enumerate((1, 0)):
        weights = weights_of("qwen3", QuantScheme.preset("none"), torch.float32, seed)
        engine.update_weights(weights, policy_version=version)
        said.append([c.logprobs for c in engine.generate([PROMPT], PARAMS, seed=0)[0]])
        assert any((folder / "kept").rglob("*.safetensors"))
    torch.save(said, folder / "said.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
