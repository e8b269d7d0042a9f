"""Rollout engines: the seam, and what stands behind it."""
