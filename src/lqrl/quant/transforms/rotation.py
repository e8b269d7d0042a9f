"""`Rotation`: a random orthogonal matrix with entries of even size, as factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix as signs times a Kronecker product: cheap to apply, never formed.

    Attributes:
        signs: ``[H]`` of 1 and -1.
        factors: orthogonal matrices whose sizes multiply to ``H``.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    @classmethod
    def random(cls, size: int, seed: int, device: torch.device | str = "cpu") -> Rotation:
        """``diag(signs) (H_{2^p} x O_m)`` for ``size = 2^p m``, ``m`` odd; fp64, the same for a seed.

        The power of two is split in two factors, so that applying it costs ``H^1.5`` and not ``H^2``.
        """
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (size,), generator=generator).double() * 2 - 1
        power = (size & -size).bit_length() - 1
        odd = size >> power
        factors = [_hadamard(power // 2), _hadamard(power - power // 2)]
        if odd > 1:
            q, r = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
            factors.append(
                (q * r.diagonal().sign()).contiguous()
            )  # with these signs the distribution is uniform (Haar)
        return cls(signs.to(device), tuple(factor.to(device) for factor in factors))

    def apply(self, rows: Tensor) -> Tensor:
        """``rows Q`` for ``[..., H]``, fp64."""
        return self._kronecker(rows.double() * self.signs, transposed=False)

    def apply_inverse(self, rows: Tensor) -> Tensor:
        """``rows Q^T`` for ``[..., H]``, fp64."""
        return self._kronecker(rows.double(), transposed=True) * self.signs

    def _kronecker(self, rows: Tensor, *, transposed: bool) -> Tensor:
        shape, before = rows.shape, 1
        for factor in self.factors:
            n = factor.shape[0]
            view = rows.reshape(-1, before, n, shape[-1] // (before * n))
            # The axis in the middle times the factor: sum_i view[..., i, :] factor[i, j].
            rows = (factor if transposed else factor.T) @ view
            before *= n
        return rows.reshape(shape)


def _hadamard(power: int) -> Tensor:
    """Sylvester's Hadamard matrix of size ``2^power``, orthogonal, fp64."""
    matrix, two = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    for _ in range(power):
        matrix = torch.kron(matrix, two)
    return matrix * 2.0 ** (-power / 2)
