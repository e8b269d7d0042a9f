"""The embedded engine and its caches on the shipped policy, whose samples the learner's forward scores again."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lqrl.algorithms.logprobs import chunked_logprobs
from lqrl.doctor.machine import device_name
from lqrl.doctor.native import COMPILER
from lqrl.doctor.packages import vllm_row
from lqrl.doctor.report import Row, Section, WrongResultError, attempt, one_line
from lqrl.engines.base import EngineSpec
from lqrl.engines.torch import TorchEngineFactory
from lqrl.modeling.backbone import hidden_states, load_model, pack
from lqrl.modeling.exact import exact_learner_
from lqrl.modeling.head import exact_logprobs, output_head
from lqrl.modeling.sources import resolve_source
from lqrl.quant import QuantScheme, exact, export_weights, prepare_
from lqrl.quant.kv import kv_rounding, prepare_kv_
from lqrl.quant.native_build import BuildError
from lqrl.quant.scheme import ADDITIONS
from lqrl.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

POLICY = "asset:countdown_policy"
_SCHEME = "int8_w8a8"
_PROMPT = (5, 6, 7)
_SAMPLES = SamplingParams(n=4, max_tokens=6, ignore_eos=True)
_LARGEST_GAP = 0.1  # of a log-prob: codes of activations may round apart in batches of other heights


def caches_section(device: torch.device) -> Section:
    """A row a format of the key/value cache."""
    names = [name for name, fields in ADDITIONS.items() if "kv_cache" in fields]
    rows = (attempt(f"+{name}", _cache, device) for name in names)
    return Section(f"key/value caches on {device_name(device)}", tuple(rows))


def engines_section(devices: list[torch.device]) -> Section:
    """The embedded engine on each device, as it is and in exact mode; then vLLM."""
    rows = [
        attempt(f"{name}, {device}", test, device)
        for device in devices
        for name, test in (("embedded", _embedded), ("exact", _exact))
    ]
    return Section("engines", (*rows, attempt("vllm", vllm_row)))


def _cache(name: str, device: torch.device) -> Row:
    scheme = QuantScheme.preset(f"none{name}")
    gap = _largest_gap(scheme, device)
    facts = {"device": str(device), "format": str(scheme.kv_cache), "largest_gap": gap}
    return Row(name, "ok", f"{scheme.kv_cache}: learner's log-probs within {gap:.1e} of the engine's", "", facts)


def _embedded(name: str, device: torch.device) -> Row:
    gap = _largest_gap(QuantScheme.preset(_SCHEME), device)
    facts = {"device": str(device), "scheme": _SCHEME, "largest_gap": gap}
    return Row(name, "ok", f"{_SCHEME}: learner's log-probs within {gap:.1e} of the engine's", "", facts)


def _exact(name: str, device: torch.device) -> Row:
    try:
        exact.check_device(device)
    except BuildError:
        return Row(name, "missing", "its C kernels are missing", COMPILER)
    except NotImplementedError as error:
        what, _, remedy = one_line(error).partition(": ")
        return Row(name, "missing", what, remedy)
    gap = _largest_gap(QuantScheme.preset(_SCHEME), device, exactly=True)
    if gap:
        raise WrongResultError(f"{_SCHEME}: learner's log-probs differ by up to {gap:.1e} from the engine's")
    facts = {"device": str(device), "scheme": _SCHEME, "largest_gap": gap}
    return Row(name, "ok", f"{_SCHEME}: learner's log-probs have the bits of the engine's", "", facts)


@torch.no_grad()
def _largest_gap(scheme: QuantScheme, device: torch.device, *, exactly: bool = False) -> float:
    """Largest difference of a log-prob between what the engine samples with and what the learner computes, in fp32."""
    policy = _policy(device)
    prepare_(policy, scheme, export_dtype=torch.float32)
    prepare_kv_(policy, scheme)
    if exactly:
        exact_learner_(policy, torch.float32)
    spec = EngineSpec(policy.config, scheme, torch.float32, device, 64, (), exact=exactly)
    engine = TorchEngineFactory()(spec)
    engine.update_weights(export_weights(policy, scheme, export_dtype=torch.float32), policy_version=0)
    (completions,) = engine.generate([Prompt(0, _PROMPT)], _SAMPLES, seed=0)
    ids = torch.stack([torch.cat([torch.tensor(_PROMPT), c.token_ids.cpu()]) for c in completions]).to(device)
    drawn = torch.stack([c.logprobs for c in completions]).to(device)
    scored = _scores(policy, ids, scheme, exactly)[:, -drawn.shape[1] :]
    gap = (scored - drawn).abs().max().item()
    if not gap <= _LARGEST_GAP:
        raise WrongResultError(f"{scheme.name}: learner's log-probs differ by up to {gap:.1e} from the engine's")
    return gap


def _scores(policy: PreTrainedModel, ids: Tensor, scheme: QuantScheme, exactly: bool) -> Tensor:
    """Log-probs ``[B, T - 1]`` of ``ids`` ``[B, T]`` after the first, by the learner's forward."""
    hidden = hidden_states(policy, pack(ids, torch.ones_like(ids), kv_rounding(policy, scheme), exactly))
    hidden = hidden.view(*ids.shape, -1)[:, :-1].flatten(0, 1)
    head = output_head(policy)
    normalize = exact_logprobs if exactly else None
    targets = ids[:, 1:]
    values = chunked_logprobs(hidden, head.weight, targets.flatten(), product=head.product, normalize=normalize)
    return values.view(targets.shape)


def _policy(device: torch.device) -> PreTrainedModel:
    """The shipped policy; the file is read once."""
    policy = load_model(_stored().config, dtype=torch.float32)
    policy.load_state_dict(_stored().state_dict())
    return policy.to(device)  # type: ignore[arg-type]


@cache
def _stored() -> PreTrainedModel:
    return load_model(resolve_source(POLICY), dtype=torch.float32)
