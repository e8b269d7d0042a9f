"""Low precision: the scheme, its numerics and kernels, and the swap of linear layers on both sides."""
