"""`VLLMServerEngine` on real vLLM servers: it says what the engine in this process says, and servers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("uvicorn")  # of vLLM's servers
import test_vllm_run
from vllm_models import DEVICE, EOS, KV_BYTES, config_of, refreshed, weights_of

from lqrl.engines.base import EngineSpec, RefreshError, StaleEngineError
from lqrl.engines.vllm import VLLMServerEngine, VLLMServerEngineFactory
from lqrl.engines.vllm.fleet import ReplicasLostError
from lqrl.engines.vllm.partial import Partial
from lqrl.engines.vllm.replica import Replica
from lqrl.quant.scheme import QuantScheme
from lqrl.quant.stream import StableTensors
from lqrl.types import Completion, Prompt, SamplingParams

pytestmark = pytest.mark.vllm

wider = test_vllm_run.wider

PRESET = "int8_w8a8" if DEVICE.type == "cpu" else "none"  # what has fp32, in which log-probs are held against others
SPEC = EngineSpec(config_of("qwen3"), QuantScheme.preset(PRESET), torch.float32, DEVICE, 128, EOS)
SAME = 1e-5 if DEVICE.type == "cpu" else 1e-4
PROMPTS = [Prompt(id=10 * i + 3, input_ids=tuple(range(4, 6 + 3 * i))) for i in range(4)]
SHORT = SamplingParams(n=(3, 5, 1, 4), max_tokens=9, temperature=0.8)
LONG = SamplingParams(n=12, max_tokens=100, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "backoff_s": 0.05}
OF_SERVERS: dict[str, Any] = {"kv_cache_bytes": KV_BYTES, "engine_args": {"enforce_eager": True}}
if DEVICE.type != "cpu":
    OF_SERVERS["gpu_memory_utilization"] = 0.05


def stream(seed: int = 0) -> StableTensors:
    return weights_of("qwen3", SPEC.scheme, SPEC.dtype, seed)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerEngine]:
    """An engine with two servers of its own."""
    directory = str(tmp_path_factory.mktemp("transfer"))
    engine = VLLMServerEngineFactory(replicas=2, transfer_directory=directory, **OPTIONS, **OF_SERVERS)(SPEC)
    yield engine
    engine.close()


@pytest.fixture
def engine(started: VLLMServerEngine) -> VLLMServerEngine:
    """The same engine after a refresh, which starts servers anew that a test has killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it may be the first to see that they are gone
        started.update_weights(stream(), policy_version=5)
    assert len(started.serving) == 2
    return started


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [c for group in groups for c in group]


def check_same(a: list[list[Completion]], b: list[list[Completion]]) -> None:
    assert [(c.prompt_id, c.sample_index) for c in flat(a)] == [(c.prompt_id, c.sample_index) for c in flat(b)]
    for x, y in zip(flat(a), flat(b), strict=True):
        assert torch.equal(x.token_ids, y.token_ids)
        torch.testing.assert_close(x.logprobs, y.logprobs, rtol=0, atol=SAME)
        assert x.finish_reason == y.finish_reason


def replica_of(engine: VLLMServerEngine, url: str) -> Replica:
    (replica,) = (replica for replica in engine._fleet.replicas if replica.url == url)
    return replica


def version_of(engine: VLLMServerEngine, url: str) -> str:
    return replica_of(engine, url).version()


def kill(engine: VLLMServerEngine, url: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Signal a server and its workers."""
    process = replica_of(engine, url)._process
    assert process is not None
    os.killpg(process.group, how)


def generates(engine: VLLMServerEngine, url: str) -> bool:
    """Whether requests of ``engine`` are under way; those for a version come one at a time."""
    return len(replica_of(engine, url).peer._open) > 1


def when(condition: Callable[[], bool], then: Callable[[], Any]) -> threading.Thread:
    """Do something as soon as a condition holds, beside what the test does."""

    def follow() -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.002)
        then()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------- what they say


def test_it_says_what_the_engine_in_this_process_says(engine: VLLMServerEngine) -> None:
    inside = refreshed("qwen3", PRESET)
    for seed in (1, 2):
        check_same(engine.generate(PROMPTS, SHORT, seed=seed), inside.generate(PROMPTS, SHORT, seed=seed))
    greedy = SamplingParams(temperature=0, max_tokens=6)
    check_same(engine.generate(PROMPTS, greedy, seed=0), inside.generate(PROMPTS, greedy, seed=0))
    sequences = [[5, 9, 4, 30, 2, 8], [7, 7], [9]]
    for ours, theirs in zip(engine.score(sequences), inside.score(sequences), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=SAME)


def test_there_and_back_is_the_same_engine(engine: VLLMServerEngine) -> None:
    reports, said = [], []
    for version, seed in enumerate((0, 1, 0)):
        reports.append(engine.update_weights(stream(seed), policy_version=version))
        said.append(engine.generate(PROMPTS, SHORT, seed=1))
        assert {c.policy_version for c in flat(said[-1])} == {version}
        assert {version_of(engine, url) for url in engine.serving} == {f"{version}-{reports[-1].digest[:16]}"}
    there, other, back = reports
    assert there.digest == back.digest != other.digest
    assert (other.codes_changed_fraction > 0.9) == SPEC.scheme.quantizes
    check_same(said[0], said[2])
    assert not any(torch.equal(a.logprobs, b.logprobs) for a, b in zip(flat(said[0]), flat(said[1]), strict=True))


def test_weights_that_compute_nan_fail_the_refresh_and_a_good_one_follows(engine: VLLMServerEngine) -> None:
    said = engine.generate(PROMPTS, SHORT, seed=1)
    huge = [(n, t.clone().fill_(3e38) if n == "model.norm.weight" else t) for n, t in stream()]
    with pytest.raises(RefreshError, match="gives NaN or inf log-probs"):
        engine.update_weights(huge, policy_version=6)
    with pytest.raises(StaleEngineError, match="its last refresh failed"):
        engine.generate(PROMPTS, SHORT, seed=1)
    assert all(version_of(engine, url).startswith("none-") for url in engine.serving)
    engine.update_weights(stream(), policy_version=7)
    check_same(engine.generate(PROMPTS, SHORT, seed=1), said)


# ---------------------------------------------------------------- what is killed


def test_a_server_that_is_killed_while_it_generates_costs_nothing(engine: VLLMServerEngine) -> None:
    whole = engine.generate(PROMPTS, LONG, seed=2)
    killed, other = engine.serving
    killer = when(lambda: generates(engine, killed), lambda: kill(engine, killed))
    with pytest.warns(UserWarning, match=rf"{killed} is lost .* [1-9]\d* of its requests are to be redone, 1 of 2"):
        check_same(engine.generate(PROMPTS, LONG, seed=2), whole)
    killer.join()
    assert engine.serving == [other]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(engine.generate(PROMPTS, LONG, seed=2), whole)


def test_servers_that_are_killed_in_a_refresh_and_at_last_in_a_generation(engine: VLLMServerEngine) -> None:
    """As servers that somebody else started, so that they do not come back."""
    said, (killed, other) = engine.generate(PROMPTS, SHORT, seed=1), engine.serving
    directory = Path(str(engine.options.transfer_directory))
    outside = VLLMServerEngineFactory(urls=[killed, other], transfer_directory=str(directory), **OPTIONS)(SPEC)
    assert outside.update_weights(stream(), policy_version=6).policy_version == 6
    check_same(outside.generate(PROMPTS, SHORT, seed=1), said)

    # The other one has loaded its weights when the first is killed, whose answer is still to come.
    def halt() -> None:
        kill(engine, killed, signal.SIGSTOP)
        when(lambda: version_of(outside, other).startswith("none-"), lambda: (time.sleep(0.5), kill(engine, killed)))

    halted = when(lambda: any(directory.glob("*/weights.json")), halt)
    with pytest.warns(UserWarning, match=rf"failed on 1 of 2 replicas: {killed}.*done again with the other 1"):
        outside.update_weights(stream(), policy_version=7)
    halted.join()
    assert version_of(outside, other).startswith("7-")
    assert outside.serving == [other]
    check_same(outside.generate(PROMPTS, SHORT, seed=1), said)

    killer = when(lambda: generates(outside, other), lambda: kill(engine, other))
    with pytest.warns(UserWarning, match="is lost"), pytest.raises(ReplicasLostError, match="no replica is left"):
        outside.generate(PROMPTS, LONG, seed=2)
    killer.join()
    with pytest.raises(StaleEngineError, match="no replica is left"):
        outside.generate(PROMPTS, SHORT, seed=1)


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also with one that is killed; it need not be up for that."""
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom lqrl.engines.vllm.launch import ServerProcess\n"
        "server = ServerProcess({'model': '/nowhere'}, Path(sys.argv[1]))\nserver.start()\n"
        "print(server.group, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        os.killpg(group, 0)  # it is there
        parent.kill()
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):  # noqa: PT012 - until it is gone
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.1)


def test_the_quickstart_trains_on_rollouts_of_a_server(wider: str, tmp_path: Path) -> None:
    engine = {"class_path": "lqrl.engines.vllm.VLLMServerEngineFactory", "init_args": OF_SERVERS}
    rows = test_vllm_run.quickstart(wider, tmp_path, engine, scheme="int8_w8a8")
    assert len(test_vllm_run.column(rows, "rollout/length")) == 3
    assert max(test_vllm_run.column(rows, "mismatch/k3")) < test_vllm_run.MOST_K3["int8_w8a8"]
    assert all(0 < moved < 0.9 for moved in test_vllm_run.column(rows, "refresh/codes_changed_fraction"))


# ---------------------------------------------------------------- partial rollouts


def test_the_quickstart_trains_on_partial_rollouts(wider: str, tmp_path: Path) -> None:
    options = OF_SERVERS | {"max_num_seqs": 8, "partial": {"limit_fraction": 0.4}}
    engine = {"class_path": "lqrl.engines.vllm.VLLMServerEngineFactory", "init_args": options}
    rows = test_vllm_run.quickstart(wider, tmp_path, engine, scheme="int8_w8a8", max_staleness=1)
    assert len(test_vllm_run.column(rows, "rollout/length")) == 3
    assert any(lag > 0 for lag in test_vllm_run.column(rows, "rollout/token_lag"))


def test_samples_that_are_cut_are_continued_under_new_weights(engine: VLLMServerEngine) -> None:
    """Twice: every token has the log-prob of the weights that its version names."""
    outside = VLLMServerEngineFactory(
        urls=engine.serving,
        transfer_directory=engine.options.transfer_directory,
        partial=Partial(limit_fraction=0.3, max_lag=2),
        **OPTIONS,
    )(SPEC)
    params = SamplingParams(n=8, max_tokens=100, temperature=1.0)  # some end by a stop token
    returned: list[tuple[Prompt, list[Completion]]] = []
    for version in (0, 1):
        outside.update_weights(stream(version), policy_version=version)
        returned += outside.generate_some([replace(p, id=p.id + version) for p in PROMPTS], params, seed=version)
        assert outside.unfinished() or version
    outside.update_weights(stream(2), policy_version=2)
    while outside.unfinished():
        returned += outside.generate_some([], params, seed=9)
    assert sorted((p.id, c.sample_index) for p, group in returned for c in group) == sorted(
        (p.id + version, i) for p in PROMPTS for version in (0, 1) for i in range(8)
    )
    texts = [([*p.input_ids, *c.token_ids.tolist()], len(p.input_ids), c) for p, group in returned for c in group]
    for _, _, c in texts:
        stops = [i for i, token in enumerate(c.token_ids.tolist()) if token in EOS]
        assert stops == ([len(c.token_ids) - 1] if c.finish_reason == "stop" else [])
        assert c.finish_reason == "stop" or len(c.token_ids) == 100
    assert any(c.finish_reason == "stop" for _, _, c in texts)
    assert any(c.token_versions is not None for _, _, c in texts)
    near = torch.zeros(3, 3)  # by who drew and who scores
    drawn = torch.zeros(3)
    for scorer in range(3):
        outside.update_weights(stream(scorer), policy_version=scorer)
        for (_, start, c), scored in zip(texts, outside.score([tokens for tokens, _, _ in texts]), strict=True):
            versions = torch.full_like(c.token_ids, c.policy_version) if c.token_versions is None else c.token_versions
            close = (c.logprobs - scored[start:]).abs() < 1e-4
            for version in range(3):
                near[version, scorer] += (close & (versions == version)).sum()
                drawn[version] += (versions == version).sum() if scorer == version else 0
    assert drawn.sum() == sum(len(c.token_ids) for _, _, c in texts)
    shares = near / drawn.clamp_min(1)[:, None]
    # an int8 activation near a boundary has another code in another batch
    assert bool((shares.diagonal()[drawn > 0] > 0.98).all()), shares
    assert bool((shares.fill_diagonal_(0) < 0.05).all()), shares


# ---------------------------------------------------------------- a refresh layer by layer


def test_a_streamed_refresh_gives_the_same_engines(engine: VLLMServerEngine) -> None:
    """Also after one in which a server is killed while it reads."""
    directory, urls = Path(str(engine.options.transfer_directory)), list(engine.serving)
    options = {"urls": urls, "transfer_directory": str(directory), "count_changes": False, **OPTIONS}
    outside = VLLMServerEngineFactory(stream_refresh=True, **options)(SPEC)
    weights, present = list(stream(1)), []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for each in weights:
            present.append(sum(path.stat().st_size for path in directory.glob("*/*") if path.suffix != ".read"))
            yield each

    streamed = outside.update_weights(watched(), policy_version=6)
    said = outside.generate(PROMPTS, SHORT, seed=1)
    whole = VLLMServerEngineFactory(**options)(SPEC).update_weights(weights, policy_version=6)
    assert (streamed.digest, streamed.elements) == (whole.digest, whole.elements)
    largest = sum(t.nbytes for name, t in weights if ".layers.0." in name)
    assert max(present) < 2.1 * largest

    killed, other = urls

    def killing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.startswith("model.layers.1."):
                kill(engine, killed)
            yield name, tensor

    with pytest.raises(RefreshError, match=rf"the refresh failed on .* of 2 replicas: .*{killed}"):
        outside.update_weights(killing(), policy_version=7)
    with pytest.raises(StaleEngineError, match="its last refresh failed"):
        outside.generate(PROMPTS, SHORT, seed=1)
    outside.update_weights(weights, policy_version=8)
    assert outside.serving == [other]
    check_same(outside.generate(PROMPTS, SHORT, seed=1), said)


# ---------------------------------------------------------------- a refresh through the GPU's memory

shares_memory = pytest.mark.skipif(DEVICE.type == "cpu", reason="shares a GPU's memory")


def over_cuda_ipc(urls: list[str], **options: Any) -> VLLMServerEngine:
    return VLLMServerEngineFactory(urls=urls, transport="cuda_ipc", **OPTIONS, **options)(SPEC)


@shares_memory
@pytest.mark.parametrize("streams", [False, True])
def test_weights_through_the_gpus_memory_give_the_same_engines(engine: VLLMServerEngine, streams: bool) -> None:
    outside = over_cuda_ipc(engine.serving, stream_refresh=streams, count_changes=not streams)
    said: list[list[Completion]] = []
    for version, seed in enumerate((1, 0)):
        files = engine.update_weights(stream(seed), policy_version=version)
        said = engine.generate(PROMPTS, SHORT, seed=1)
        engine.update_weights(stream(2), policy_version=9)
        memory = outside.update_weights(stream(seed), policy_version=version)
        assert (memory.digest, memory.elements) == (files.digest, files.elements)
        check_same(outside.generate(PROMPTS, SHORT, seed=1), said)
        assert {r.version() for r in outside._fleet.serving} == {f"{version}-{memory.digest[:16]}"}
    with pytest.raises(RefreshError, match="missing: model"):
        outside.update_weights([w for w in stream() if w[0] != "model.norm.weight"], policy_version=7)
    with pytest.raises(StaleEngineError, match="its last refresh failed"):
        outside.generate(PROMPTS, SHORT, seed=1)
    outside.update_weights(stream(), policy_version=8)
    check_same(outside.generate(PROMPTS, SHORT, seed=1), said)


@shares_memory
def test_a_server_that_is_killed_while_it_reads_the_gpus_memory(engine: VLLMServerEngine, tmp_path: Path) -> None:
    said, (killed, other) = engine.generate(PROMPTS, SHORT, seed=1), engine.serving
    outside = over_cuda_ipc([killed, other], transfer_directory=str(tmp_path))
    killer = when(lambda: any(tmp_path.glob("*/parts.json")), lambda: kill(engine, killed))
    with pytest.warns(UserWarning, match=rf"replicas: .*{killed}.*done again with the other 1"):
        outside.update_weights(stream(), policy_version=6)
    killer.join()
    assert outside.serving == [other]
    check_same(outside.generate(PROMPTS, SHORT, seed=1), said)


@shares_memory
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cards", ["1", "0,1"])
def test_the_gpus_memory_is_read_by_servers_on_other_gpus(engine: VLLMServerEngine, cards: str) -> None:
    said = engine.generate(PROMPTS, SHORT, seed=1)
    options: dict[str, Any] = OPTIONS | OF_SERVERS | {"cards": [cards]}
    elsewhere = VLLMServerEngineFactory(**options, transport="cuda_ipc")(replace(SPEC, device=torch.device("cuda", 0)))
    try:
        memory = elsewhere.update_weights(stream(), policy_version=1)
        check_same(elsewhere.generate(PROMPTS, SHORT, seed=1), said)
        files = VLLMServerEngineFactory(urls=elsewhere.serving, **OPTIONS)(SPEC)
        assert files.update_weights(stream(), policy_version=1).digest == memory.digest
    finally:
        elsewhere.close()
