"""MiMo as vLLM has to run it to extract hidden states.

MiMo's layers are Qwen2's, but vLLM's own class (vllm/model_executor/models/mimo.py) hands out no layer's states.
Runs in vLLM's processes only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper


class MiMoWithHiddenStates(Qwen2ForCausalLM):
    """Qwen2 that leaves a MiMo checkpoint's MTP layers aside."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a MiMo checkpoint; the names of the parameters that were loaded."""
        mapper = WeightsMapper(orig_to_new_prefix={"model.mtp_layers.": None})
        return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)
