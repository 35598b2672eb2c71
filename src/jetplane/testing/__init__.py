"""Oracles that are not jetplane's own code, and the sweep over PyTorch's operation database."""
