"""Seeds as functions of what they are for, so that there is no generator state to save."""

from __future__ import annotations

import hashlib

Part = int | str


def derive_seed(*parts: Part) -> int:
    """A 63-bit seed from the parts, the same on every machine; ``derive_seed(run_seed, "rollout", iteration)``."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
