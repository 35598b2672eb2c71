"""Passes over a program, in chunks and again, and the public transforms made of them."""
