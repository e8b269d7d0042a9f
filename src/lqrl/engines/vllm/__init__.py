"""Rollouts by vLLM, in this process; the one package that imports vllm."""

from lqrl.engines.vllm.engine import VLLMEngine, VLLMEngineFactory

__all__ = ["VLLMEngine", "VLLMEngineFactory"]
