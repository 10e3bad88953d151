"""Retention: hidden states that the policy does not keep are deleted from the store."""

from __future__ import annotations

import logging
from collections.abc import Collection

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from speculators.config import RetentionConfig
from speculators.hidden_states.retention import Outcome, after_training, apply_policy
from speculators.store import Store

logger = logging.getLogger(__name__)


@task(name="apply-retention", cache_policy=NO_CACHE, persist_result=False)
def apply_retention(
    store: Store, policy: RetentionConfig, trained: str | None = None, keep: Collection[str] = ()
) -> list[Outcome]:
    """Delete sets of hidden states as the policy says; the outcome of each becomes a table in the Prefect UI.

    Args:
        trained: Folder of the set that a drafter has just been trained on, for ``policy.after_training``.
        keep: Folders of sets that stay whatever the policy says.
    """
    outcomes: list[Outcome] = []
    if trained is not None and policy.after_training == "delete":
        outcomes.append(after_training(store, trained, policy))
    decided = {outcome.directory for outcome in outcomes}
    for outcome in apply_policy(store, policy, keep={*keep, *decided}):
        if outcome.directory not in decided:
            outcomes.append(outcome)
    _log(store, outcomes)
    create_table_artifact(
        table=[table_row(store, outcome) for outcome in outcomes],
        key="hidden-states-retention",
        description="Sets of hidden states, the least recently used one first, and what became of each",
    )
    return outcomes


def table_row(store: Store, outcome: Outcome) -> dict[str, str]:
    """An outcome for people."""
    return {
        "set": store.url_of(outcome.directory),
        "GiB": f"{outcome.bytes / 2**30:.2f}",
        "action": outcome.action,
        "reason": outcome.reason,
    }


def _log(store: Store, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        level = logging.WARNING if outcome.action == "failed" else logging.INFO
        logger.log(level, "%s: %s, %s", store.url_of(outcome.directory), outcome.action, outcome.reason)
    deleted = [outcome for outcome in outcomes if outcome.action == "deleted"]
    freed = sum(outcome.bytes for outcome in deleted)
    logger.info("%d of %d sets of hidden states deleted, %.2f GiB freed.", len(deleted), len(outcomes), freed / 2**30)
