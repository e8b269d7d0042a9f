"""Reinforcement learning of language models with quantized rollouts."""

__version__ = "0.1.0"
