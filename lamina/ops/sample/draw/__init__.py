"""Kernels of the random draw, with `triton.py` of the folder above."""
