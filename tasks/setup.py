"""Resolve the verifier, check the store, derive the plan."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.config import RetrainConfig


@task(name="set-up", cache_policy=NO_CACHE, persist_result=False)
def set_up(config: RetrainConfig) -> stages.Retraining:
    """Everything that can be wrong before any work is found here: verifier, store, prompts, fields that do not fit."""
    return stages.open_retraining(config)
