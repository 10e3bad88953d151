"""The driver of the "cpu" backend: just enough for the interpreter, which runs kernels on CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from speculators.serving.triton_cpu import is_interpreting


class CpuDriver(DriverBase):
    """Active only where kernels are interpreted."""

    def __init__(self) -> None:
        """Triton's own constructor asks for a compiled launcher."""

    @staticmethod
    def is_active() -> bool:
        return is_interpreting()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"

    def get_benchmarker(self) -> Any:
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def clear_cache(self, cache: Any) -> None:
        """There is none."""
