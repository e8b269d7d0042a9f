"""Children that have a vLLM: the options that say where it is, and the variables that they are started with."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from children import searched_first
from options import require

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the child, as this library's does
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Where the vLLM of the children is."""
    parser.add_argument("--vllm-path", type=Path, help="a folder with vLLM and what it needs")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter that has vLLM")


def require_vllm(args: argparse.Namespace) -> None:
    """End the program where the children would miss vLLM; what another interpreter has is not looked for."""
    if args.vllm_python == sys.executable:
        require("vllm", "--vllm-path or --vllm-python", args.vllm_path)


def vllm_environment(path: Path | None, **more: str) -> dict[str, str]:
    """Variables of a child; one that is set here keeps its value.

    Args:
        path: of ``--vllm-path``.
        more: besides `VLLM_ENVIRONMENT`.
    """
    wanted = VLLM_ENVIRONMENT | more
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | searched_first(path)
