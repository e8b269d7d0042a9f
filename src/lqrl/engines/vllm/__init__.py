"""Rollouts by vLLM, in this process or by servers; the one package that imports vllm."""

from lqrl.engines.vllm.engine import VLLMEngine
from lqrl.engines.vllm.factory import VLLMEngineFactory
from lqrl.engines.vllm.server import VLLMServerEngine
from lqrl.engines.vllm.server_factory import VLLMServerEngineFactory

__all__ = ["VLLMEngine", "VLLMEngineFactory", "VLLMServerEngine", "VLLMServerEngineFactory"]
