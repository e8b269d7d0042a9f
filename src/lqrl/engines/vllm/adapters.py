"""LoRA adapters beside vLLM's weights: what it must be told, sent and held for one policy.

vLLM takes an adapter as a folder in peft's layout, and says nothing of layers for which it finds none in it. So what
its layers hold is compared with what was sent, tensor by tensor.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lqrl.engines.base import EngineSpec, RefreshError
from lqrl.engines.digest import tensor_digests
from lqrl.modeling.backbone import load_model
from lqrl.quant.lora import ADAPTER_NAME, Lora

_ID, _NAME = 1, "policy"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_FACTORS = ("lora_A", "lora_B")


class ServedAdapters:
    """The adapters of ``lora`` as vLLM holds them.

    Attributes:
        tensors: what a refresh sends of them, by the names of `lqrl.quant.export.export_weights`; on the meta device.
        arguments: for ``vllm.LLM``.

    Args:
        spec: what is served.
        lora: its adapters.

    Raises:
        ValueError: for a rank beyond vLLM's kernels, on a CPU in a format whose layers take no adapter there, or for
            fp32 elsewhere.
    """

    def __init__(self, spec: EngineSpec, lora: Lora) -> None:
        activation = spec.scheme.activation
        if spec.device.type == "cpu" and activation is not None and activation.dtype == "int8":
            raise ValueError(
                f"scheme {spec.scheme.name!r}: on a CPU vLLM's int8 layers hold no weight that an adapter could be "
                "placed beside; set lora.refresh: merge, or take another format or lqrl.engines.TorchEngineFactory"
            )
        if spec.device.type != "cpu" and spec.dtype == torch.float32:
            raise ValueError("vLLM's adapters have no fp32 on a GPU; set model.init_args.dtype: bfloat16")
        rank = next((rank for rank in _RANKS if rank >= lora.r), None)
        if rank is None:
            raise ValueError(
                f"Lora.r={lora.r}: vLLM has adapters of rank {_RANKS[-1]} at most; set lora.refresh: merge"
            )
        self._lora = lora
        with torch.device("meta"):
            model = load_model(spec.config, dtype=spec.dtype)
        self._layers = lora.targets(model)
        self.tensors: dict[str, Tensor] = {}
        for name in self._layers:
            rows, columns = model.get_parameter(f"{name}.weight").shape
            for factor, shape in zip(_FACTORS, ((lora.r, columns), (rows, lora.r)), strict=True):
                self.tensors[f"{name}.{factor}.weight"] = torch.empty(shape, dtype=spec.dtype, device="meta")
        self.arguments: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": rank,
            # Else embeddings and the head are wrapped too, which take another path then.
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self._layers}),
        }

    def request(self, folder: Path | None = None) -> Any:
        """What vLLM calls the adapter: the one it holds, or the one in ``folder``, to be held instead."""
        from vllm.lora.request import LoRARequest

        if folder is None:
            return LoRARequest(_NAME, _ID, "held already")
        return LoRARequest(_NAME, _ID, str(folder), load_inplace=True)

    def put(self, llm: Any, received: Mapping[str, Tensor]) -> None:
        """Have ``llm`` hold the adapters among ``received`` instead of those that it holds.

        Raises:
            RefreshError: when vLLM fails, or holds others afterwards.
        """
        with tempfile.TemporaryDirectory(prefix="lqrl-vllm-") as folder:
            self.write(received, Path(folder))
            try:
                with torch.inference_mode(False), torch.no_grad():
                    llm.llm_engine.add_lora(self.request(Path(folder)))
            except Exception as error:
                raise RefreshError(f"vLLM failed while it loaded the adapters: {error}") from error
        llm.collective_rpc(self.check, args=(received,))

    def write(self, received: Mapping[str, Tensor], folder: Path) -> None:
        """Write the adapters among ``received`` as peft does."""
        from safetensors.torch import save_file

        files = {f"base_model.model.{name}": received[name].cpu().contiguous() for name in self.tensors}
        save_file(files, folder / "adapter_model.safetensors")
        described = {
            "peft_type": "LORA",
            "r": self._lora.r,
            "lora_alpha": self._lora.alpha,
            "target_modules": self._layers,
        }
        (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")

    def check(self, worker: Any, received: Mapping[str, Tensor]) -> None:
        """Refuse what vLLM's layers hold unless it is ``received``; runs inside the worker.

        Raises:
            RefreshError: naming a layer whose adapter did not arrive.
        """
        held = dict(held_factors(worker))
        wrong = [name for name in self.tensors if not self._arrived(name, received[name], held)]
        if wrong:
            raise RefreshError(
                f"{len(wrong)} of {len(self.tensors)} adapter tensors are not what vLLM holds, first {wrong[0]}; its "
                "layers have other names or take no adapters: set lora.refresh: merge"
            )

    def _arrived(self, name: str, sent: Tensor, held: Mapping[str, Tensor]) -> bool:
        match = ADAPTER_NAME.match(name)
        found = None if match is None else held.get(f"{match['layer']}.{match['factor']}")
        if match is None or found is None:
            return False
        if match["factor"] == "lora_B":  # vLLM holds it scaled
            sent = sent * self._lora.scaling
        rows, columns = sent.shape
        part = found[:rows, :columns]
        return part.shape == sent.shape and bool((part == sent.to(part.device)).all())


def held_factors(worker: Any) -> Iterator[tuple[str, Tensor]]:
    """The adapter that vLLM's layers compute with: ``<layer>.lora_A`` and ``<layer>.lora_B``, by a checkpoint's names.

    Matrices are padded to the largest rank; ``lora_B`` is scaled. Nothing when none is loaded.
    """
    manager: Any = worker.get_model().lora_manager
    if _ID not in manager.lora_index_to_id:
        return
    slot = manager.lora_index_to_id.index(_ID)
    for name, layer in manager.modules.items():
        parent, _, last = name.rpartition(".")
        parts = manager.packed_modules_mapping.get(last, [last])
        for factor, stacks in zip(_FACTORS, (layer.lora_a_stacked, layer.lora_b_stacked), strict=True):
            for part, stack in zip(parts, stacks, strict=True):
                yield f"{parent}.{part}.{factor}", stack[slot, 0]


def held_factor_digests(worker: Any) -> dict[str, str]:
    """Digests of `held_factors`, by name."""
    held = dict(held_factors(worker))
    return {name: str(value) for name, value in zip(held, tensor_digests(list(held.values())), strict=True)}
