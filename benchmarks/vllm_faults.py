"""What is lost when a vLLM server is killed, stopped, cut off or changed: real servers, one Markdown table.

Two servers with a tiny policy run behind proxies on this machine, and `VLLMServerEngine` drives them. Every row starts
with both, does one thing to the first, and compares the samples with those of an undisturbed call, token by token.

    python benchmarks/vllm_faults.py
    python benchmarks/vllm_faults.py --cases "killed while it generates" --device cuda
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# Before vLLM is imported: no log, nothing sent home, no compiler.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from proxy import Proxy
from torch import Tensor
from transformers import Qwen3Config

from lqrl.engines.base import EngineSpec, RefreshError, StaleEngineError
from lqrl.engines.vllm import VLLMEngineFactory, VLLMServerEngine, VLLMServerEngineFactory
from lqrl.engines.vllm.arguments import engine_arguments
from lqrl.engines.vllm.fleet import ReplicasLostError
from lqrl.engines.vllm.launch import ServerProcess
from lqrl.engines.vllm.partial import Partial
from lqrl.engines.vllm.peer import Patience, Peer
from lqrl.engines.vllm.served import ServedModel
from lqrl.modeling.backbone import load_model
from lqrl.quant.export import export_weights
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Completion, Prompt, SamplingParams

CONFIG = Qwen3Config(
    vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.15,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
PROMPTS = [Prompt(id=10 * i + 3, input_ids=tuple(range(4, 6 + 3 * i))) for i in range(4)]
PARAMS = SamplingParams(n=12, max_tokens=100, ignore_eos=True)
SEED, START_S = 2, 300.0
HEADER = ("what was done to one of two", "what followed", "lost", "doubled", "other tokens", "redone", "replicas left",
          "seconds")  # fmt: skip
Groups = list[list[Completion]]


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        followed: in words.
        groups: the samples in the end.
        redone: in words.
        left: replicas that serve when the samples have come, before a refresh takes lost ones back.
        seconds: of the disturbed part, retries and what was redone included, but no start of a server.
    """

    followed: str
    groups: Groups
    redone: str
    left: int
    seconds: float


class Server:
    """A vLLM server behind a proxy.

    Args:
        arguments: of ``vllm.LLM``.
        log: file for what it prints.
    """

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        self.process = ServerProcess(arguments, log)
        self.proxy = Proxy(self.process.port)

    def signal(self, which: signal.Signals) -> None:
        """Signal the server and its workers."""
        os.killpg(self.process.group, which)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def pretend(self, version: str) -> None:
        """Have it say that its weights are another version."""
        Peer(self.process.url, Patience(30)).post("/update_weight_version", {"new_version": version})


class Bench:
    """Two servers, an engine, and the samples that an undisturbed call gives."""

    def __init__(self, device: torch.device, directory: Path) -> None:
        self.spec = EngineSpec(CONFIG, QuantScheme.preset("none"), torch.float32, device, 128, ())
        self.weights = list(export_weights(load_model(CONFIG, dtype=torch.float32, seed=0), self.spec.scheme,
                                           export_dtype=torch.float32))  # fmt: skip
        self.directory, self.version = directory, 0
        arguments = self._arguments()
        self.servers = [Server(arguments, directory / f"{i}.log") for i in range(2)]
        self.start_servers()
        self.engine = self.another()
        self.refresh()
        self.generate()  # the first call compiles
        started = time.monotonic()
        self.expected = self.generate()
        self.undisturbed = time.monotonic() - started

    def _arguments(self) -> dict[str, Any]:
        from vllm.engine.arg_utils import EngineArgs

        cpu = self.spec.device.type == "cpu"
        options = VLLMEngineFactory(
            max_num_seqs=4,
            kv_cache_bytes=2**24,  # without it vLLM measures what is free, which the other server changes
            gpu_memory_utilization=None if cpu else 0.05,
            engine_args={"enforce_eager": True},
        )
        ServedModel(self.spec, unties=cpu).write_config(self.directory)
        return engine_arguments(self.spec, options, self.directory, frozenset(f.name for f in fields(EngineArgs)))

    def start_servers(self) -> None:
        """Start those that do not run, and wait until all answer."""
        for server in self.servers:
            server.proxy.watch = lambda request: None
            if server.process.ended:
                server.process.start()
        for server in self.servers:
            server.process.wait(time.monotonic() + START_S)

    def another(self, **options: Any) -> VLLMServerEngine:
        """An engine on the same servers; closing it leaves them alone."""
        options = {"timeout_s": 60, "attempts": 4, "backoff_s": 0.2, "max_num_seqs": 4, **options}
        urls = [server.proxy.url for server in self.servers]
        return VLLMServerEngineFactory(urls=urls, transfer_directory=str(self.directory), **options)(self.spec)

    def refresh(self, engine: VLLMServerEngine | None = None, weights: Any = None) -> None:
        self.version += 1
        (engine or self.engine).update_weights(weights or self.weights, policy_version=self.version)

    def restored(self, **options: Any) -> VLLMServerEngine:
        """A new engine after a refresh, with both servers up."""
        self.start_servers()
        engine = self.another(**options)
        self.refresh(engine)
        assert len(engine.serving) == 2
        return engine

    def generate(self, engine: VLLMServerEngine | None = None) -> Groups:
        return (engine or self.engine).generate(PROMPTS, PARAMS, seed=SEED)


# ---------------------------------------------------------------- while and between


def disturbed(
    bench: Bench, disturb: Callable[[Server], Any], *, share: float | None = 1 / 3, **options: Any
) -> Outcome:
    """Samples of a call that is disturbed after ``share`` of its usual time; ``None`` is before it."""
    engine, server = bench.restored(**options), bench.servers[0]
    if share is None:
        disturb(server)

    def later(share: float) -> None:
        time.sleep(share * bench.undisturbed)
        disturb(server)

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        started = time.monotonic()
        done = None if share is None else pool.submit(later, share)
        groups = bench.generate(engine)
        seconds = time.monotonic() - started
        if done is not None:
            done.result()
    lost = [str(each.message) for each in said if "is lost" in str(each.message)]
    redone = sum(int(count) for text in lost for count in re.findall(r"(\d+) of its requests", text))
    followed = "reported as lost, its samples redone by the other" if lost else "asked again, nobody is lost"
    return Outcome(followed, groups, f"{redone} of 48 samples", len(engine.serving), seconds)


def cut_connections(bench: Bench) -> Outcome:
    cut: list[int] = []
    outcome = disturbed(bench, lambda server: cut.append(server.proxy.drop()))
    outcome.redone = f"{cut[0]} of 48 samples"
    return outcome


def stopped(bench: Bench, seconds: float, **options: Any) -> Outcome:
    def stop(server: Server) -> None:
        server.signal(signal.SIGSTOP)
        threading.Timer(seconds, server.signal, (signal.SIGCONT,)).start()

    outcome = disturbed(bench, stop, **options)
    if outcome.left == 2:
        outcome.followed = "waited for"
    time.sleep(max(0.0, seconds - outcome.seconds) + 1)
    return outcome


def both_killed(bench: Bench) -> Outcome:
    engine = bench.restored()
    kill = lambda: [server.kill() for server in bench.servers]  # noqa: E731
    timer = threading.Timer(bench.undisturbed / 3, kill)
    started = time.monotonic()
    timer.start()
    try:
        bench.generate(engine)
    except ReplicasLostError:
        left, seconds = len(engine.serving), time.monotonic() - started
    else:
        raise RuntimeError("samples came from servers that were killed")
    timer.join()
    bench.start_servers()
    started = time.monotonic()
    bench.refresh(engine)
    groups = bench.generate(engine)
    seconds += time.monotonic() - started
    return Outcome("the call fails; after a refresh it is repeated", groups, "the call", left, seconds)


# ---------------------------------------------------------------- refresh


def in_a_refresh(bench: Bench, route: bytes | None, **options: Any) -> Outcome:
    """Killed when ``route`` is asked; ``None`` is in the middle of a stream of layers."""
    engine, server = bench.restored(**options), bench.servers[0]

    def killing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in bench.weights:
            if route is None and name.startswith("model.layers.1.") and not server.process.ended:
                server.kill()
            yield name, tensor

    if route is not None:
        server.proxy.watch = lambda request: server.kill() if route in request else None
    started = time.monotonic()
    followed, redone = "reported as lost, the refresh goes on with the other", "the refresh"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bench.refresh(engine, killing())
        except RefreshError:
            followed, redone = _after_a_failure(bench, engine), "the refresh, by the caller"
    _check_killed(server)
    seconds, left = time.monotonic() - started, len(engine.serving)
    return Outcome(followed, bench.generate(engine), redone, left, seconds)


def _check_killed(server: Server) -> None:
    if not server.process.ended:
        raise RuntimeError("nobody was killed")


def _after_a_failure(bench: Bench, engine: VLLMServerEngine) -> str:
    try:
        bench.generate(engine)
    except StaleEngineError:
        bench.refresh(engine)
        return "the refresh fails, the engine refuses; the next refresh goes on with the other"
    raise RuntimeError("samples came after a refresh that failed")


# ---------------------------------------------------------------- partial rollouts


def killed_before_a_cut(bench: Bench) -> Outcome:
    """The samples are those of other weights in part, so that their tokens are not compared."""
    engine, server = bench.restored(partial=Partial(limit_fraction=0.5)), bench.servers[0]
    server.proxy.watch = lambda request: server.kill() if b"/pause" in request else None
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        some = engine.generate_some(PROMPTS, PARAMS, seed=SEED)
    _check_killed(server)
    left, kept = len(engine.serving), sum(len(d["token_ids"]) for g in engine.unfinished() for d in g["drafts"])
    redone = sum(int(n) for each in said for n in re.findall(r"(\d+) of its requests", str(each.message)))
    server.proxy.watch = lambda request: None
    while engine.unfinished():
        bench.refresh(engine)
        some += engine.generate_some([], PARAMS, seed=SEED)
    seconds = time.monotonic() - started
    groups = [group for _, group in sorted(some, key=lambda each: each[0].id)]
    mixed = sum(c.token_versions is not None for group in groups for c in group)
    followed = f"{kept} tokens kept, {mixed} samples continued under the next weights"
    return Outcome(followed, groups, f"what it began of {redone} samples", left, seconds)


CASES: dict[str, Callable[[Bench], Outcome]] = {
    "killed while it generates": lambda b: disturbed(b, Server.kill),
    "killed between two calls": lambda b: disturbed(b, Server.kill, share=None),
    "both killed while they generate": both_killed,
    "killed while it loads a refresh": lambda b: in_a_refresh(b, b"lqrl_load"),
    "killed after it has loaded a refresh": lambda b: in_a_refresh(b, b"/reset_prefix_cache"),
    "killed before it gets its version": lambda b: in_a_refresh(b, b'"%d-' % (b.version + 2)),
    "killed in a refresh layer by layer": lambda b: in_a_refresh(b, None, stream_refresh=True, count_changes=False),
    "killed when partial samples are cut off": killed_before_a_cut,
    "its connections dropped": cut_connections,
    "stopped for 3 s": lambda b: stopped(b, 3.0),
    "stopped for longer than timeout_s, 5 s, twice": lambda b: stopped(b, 30.0, timeout_s=5, attempts=2),
    "another version before a call": lambda b: disturbed(b, lambda server: server.pretend("9-other"), share=None),
    "another version while it generates": lambda b: disturbed(b, lambda server: server.pretend("9-other")),
}


def row(case: str, outcome: Outcome, expected: Groups) -> str:
    """One line of the table."""
    wanted = {(c.prompt_id, c.sample_index): c for group in expected for c in group}
    found = Counter((c.prompt_id, c.sample_index) for group in outcome.groups for c in group)
    doubled = sum(count - 1 for count in found.values())
    flat = [c for group in outcome.groups for c in group]
    unequal = sum(not torch.equal(c.token_ids, wanted[c.prompt_id, c.sample_index].token_ids) for c in flat)
    other = "not compared" if any(c.token_versions is not None for c in flat) else str(unequal)
    cells = (case, outcome.followed, str(len(wanted.keys() - found.keys())), str(doubled), other, outcome.redone)
    return f"| {' | '.join(cells)} | {outcome.left} | {outcome.seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    args = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lqrl-faults-")))
        bench = Bench(torch.device(args.device), directory)
        for server in bench.servers:
            stack.callback(server.proxy.close)
            stack.callback(server.process.stop)
        print(f"undisturbed: 48 samples of 100 tokens in {bench.undisturbed:.1f} s\n")
        print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
        for case in args.cases:
            try:
                print(row(case, CASES[case](bench), bench.expected), flush=True)
            except Exception as error:  # the other cases are still worth a row
                print(f"| {case} | FAILED: {type(error).__name__}: {error} |", flush=True)


if __name__ == "__main__":
    main()
