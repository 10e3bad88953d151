"""Export: the best checkpoint as the folder that vLLM serves."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from speculators import stages
from speculators.manifest import Manifest
from tasks.tracking import Tracker, stage_run


@task(name="export", cache_policy=NO_CACHE, persist_result=False)
def export(run: stages.Retraining, tracker: Tracker) -> Manifest:
    """Validate and export the drafter, and keep its folder as the artifact ``drafter`` of the stage's run."""
    with stage_run(tracker, run.plan.export, run.store) as (child, record):
        manifest = stages.run_export(run)
        record(manifest)
        child.log_file(stages.drafter_folder(run), "drafter")
    return manifest
