"""Passes captured as graphs and compiled; CUDA graphs of them."""
