"""Triton's interpreter as vLLM's "cpu" Triton backend, for checks of DSpark and DFlash2 on machines without a GPU.

Both need vLLM's V2 model runner, whose kernels are Triton's. Only a server that is started with Triton on its path and
``TRITON_INTERPRET=1`` (see ``serving/vllm_server.py``) uses this; it is found by the entry points in pyproject.toml.
"""

from __future__ import annotations

import os


def is_interpreting() -> bool:
    """Whether this process is to interpret Triton kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def accept_integer_masks() -> None:
    """vLLM's general plugin: one DFlash2 kernel passes integers as masks, which the interpreter refuses."""
    if not is_interpreting():
        return
    from triton.runtime import interpreter

    native = interpreter._interpreter
    load, store = native.load, native.store
    native.load = lambda pointers, mask, other, dtype: load(pointers, mask.astype(bool), other, dtype)
    native.store = lambda pointers, values, mask: store(pointers, values, mask.astype(bool))
