"""Triton asks a backend for a compiler. The interpreter never compiles, so any will do."""

from triton.backends.nvidia.compiler import CUDABackend

__all__ = ["CUDABackend"]
