"""The learner."""

from lqrl.learner.module import PolicyModule
from lqrl.learner.muon import MuonAdamW
from lqrl.learner.noise import RolloutNoise
from lqrl.learner.optim import KahanAdamW, StochasticAdamW

__all__ = ["KahanAdamW", "MuonAdamW", "PolicyModule", "RolloutNoise", "StochasticAdamW"]
