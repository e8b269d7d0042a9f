"""``lqrl doctor``: what this machine can run, with a self-test of each part, and what to install for the rest."""

from __future__ import annotations

from lqrl.doctor.command import main

__all__ = ["main"]
