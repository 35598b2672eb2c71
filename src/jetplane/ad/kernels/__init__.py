"""Fused kernels, each beside the plain form that it is tested against."""
