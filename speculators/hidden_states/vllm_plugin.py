"""vLLM's general plugin (an entry point in pyproject.toml): architectures that only extraction asks for."""

from __future__ import annotations

MIMO_WITH_HIDDEN_STATES = "MiMoWithHiddenStates"


def register_architectures() -> None:
    """Make them known to vLLM; their modules are imported when one is asked for."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(
        MIMO_WITH_HIDDEN_STATES, f"speculators.hidden_states.vllm_mimo:{MIMO_WITH_HIDDEN_STATES}"
    )
