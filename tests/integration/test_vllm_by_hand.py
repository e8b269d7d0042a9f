"""A vLLM server that is started by hand, as docs/vllm.md says, and ended with its process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("uvicorn")  # of vLLM's servers
from vllm_models import DEVICE, EOS, config_of, policy_of, refreshed, weights_of

from lqrl.engines.base import EngineSpec, EngineUnavailableError
from lqrl.engines.vllm import VLLMServerEngineFactory
from lqrl.engines.vllm.launch import free_port
from lqrl.quant.scheme import QuantScheme
from lqrl.types import Prompt, SamplingParams
from test_doc_snippets import block

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the command is that for a CPU"),
]

PROMPTS = [Prompt(id=i, input_ids=tuple(range(4, 9 + i))) for i in range(3)]
PARAMS = SamplingParams(n=4, max_tokens=6)


def up(url: str) -> bool:
    with suppress(urllib.error.URLError, ConnectionError):
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    return False


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a server of a folder; its URL once it is up."""
    started: list[subprocess.Popen[bytes]] = []

    def one(model: Path, without: str = "") -> str:
        port = free_port()
        command = block("vllm", "sh", "--enforce-eager").replace("--model MODEL", f"--model {model}")
        assert without in command
        command = command.replace(without, "")
        command = command.replace("python -m", f"{sys.executable} -m").replace("--port 8000", f"--port {port}")
        command = command.replace("--max-model-len 8192", "--max-model-len 128")
        log = (tmp_path / "log").open("wb")
        started.append(subprocess.Popen(command, shell=True, start_new_session=True, stdout=log, stderr=log))
        deadline = time.monotonic() + 240
        while not up(f"http://127.0.0.1:{port}"):
            running = started[-1].poll() is None and time.monotonic() < deadline
            assert running, (tmp_path / "log").read_text()[-6000:]
            time.sleep(0.5)
        return f"http://127.0.0.1:{port}"

    yield one
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("preset", ["int8_w8a8", "none"])
def test_a_server_started_as_the_guide_says_serves_the_recipe(
    preset: str, serve: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy_of("qwen3").save_pretrained("policy")  # ties its head
    code = block("vllm", "python", "save_quantized").replace("models/smollm2", "policy")
    exec(code.replace("int8_w8a8", preset), {})
    url = serve(tmp_path / "MODEL")
    scheme = QuantScheme.preset(preset)
    spec = EngineSpec(config_of("qwen3"), scheme, torch.float32, DEVICE, 128, EOS)
    engine = VLLMServerEngineFactory(urls=[url])(spec)
    engine.update_weights(weights_of("qwen3", scheme, torch.float32), policy_version=5)
    inside = refreshed("qwen3", preset).generate(PROMPTS, PARAMS, seed=3)
    for group, wanted in zip(engine.generate(PROMPTS, PARAMS, seed=3), inside, strict=True):
        for a, b in zip(group, wanted, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
    engine.close()


def test_a_server_that_cuts_prompts_is_refused(serve: Callable[..., str], tmp_path: Path) -> None:
    """It may be left on with room for all prompts at once, which this one has not."""
    policy_of("qwen2").save_pretrained(tmp_path / "MODEL")
    url = serve(tmp_path / "MODEL", without="--no-enable-chunked-prefill")
    spec = EngineSpec(config_of("qwen2"), QuantScheme.preset("none"), torch.float32, DEVICE, 128, EOS)
    with pytest.raises(EngineUnavailableError, match=r"it cuts prompts, .*start it with --no-enable-chunked-prefill"):
        VLLMServerEngineFactory(urls=[url])(spec)


def test_an_engine_is_built_and_asked_as_the_guide_says(tmp_path: Path) -> None:
    script, root = tmp_path / "own.py", Path(__file__).parents[2]
    script.write_text(block("vllm", "python", "engine.score"))
    subprocess.run([sys.executable, root / "examples/widen_policy.py", tmp_path / "models/countdown"], check=True)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split()[0] for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 ")]
    assert lines == ["0"] * 4 + ["1"] * 4
    assert "[tensor([" in done.stdout
