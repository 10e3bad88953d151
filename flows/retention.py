"""A job to schedule: delete the hidden states that nobody needs any more.

Run it here with ``python -m flows.retention --store URL --max-age-days 14 --max-total-gib 500``, or deploy it
(prefect.yaml).
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Annotated

from prefect import flow
from prefect.exceptions import ParameterTypeError
from pydantic import Field

from speculators.config import RetentionConfig
from speculators.errors import PipelineError
from speculators.store import Store
from tasks.logs import quiet_pipeline_errors
from tasks.retention import apply_retention, table_row

Limit = Annotated[float | None, Field(ge=0)]


@flow(name="retention", persist_result=False, validate_parameters=True)
def retention(
    store: str = "work/store",
    max_age_days: Limit = None,
    max_total_gib: Limit = None,
    keep: list[str] | None = None,
    work_dir: str = "work",
) -> str:
    """Delete sets of hidden states that are too old or too much. Sets that a running job uses stay.

    Args:
        store: A folder or an fsspec URL (s3://bucket/prefix).
        max_age_days: Sets that were neither written nor used for so many days go. Empty: no limit.
        max_total_gib: The least recently used sets go until the others take no more. Empty: no limit.
        keep: Fingerprints of sets that stay in any case.
        work_dir: Local folder whose cached copies of deleted sets go too.

    Returns:
        A table of the sets as Markdown.
    """
    quiet_pipeline_errors()
    opened = Store(store, cache_dir=Path(work_dir) / "cache")
    opened.check_writable()
    policy = RetentionConfig(max_age_days=max_age_days, max_total_gib=max_total_gib)
    outcomes = apply_retention(opened, policy, keep=[f"hidden_states/{fingerprint}" for fingerprint in keep or []])
    rows = [table_row(opened, outcome).values() for outcome in outcomes]
    return "\n".join(f"| {' | '.join(row)} |" for row in [("Set", "GiB", "Action", "Reason"), ("---",) * 4, *rows])


def main() -> None:
    """Run the flow in this process and print its table; exit status 1 and one clear line on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.retention", description="Delete hidden states that nobody needs any more."
    )
    parser.add_argument("--store", default="work/store", help="a folder or an fsspec URL (s3://bucket/prefix)")
    parser.add_argument("--max-age-days", type=float, metavar="DAYS", help="sets unused for longer go")
    parser.add_argument("--max-total-gib", type=float, metavar="GIB", help="least recently used sets go above this")
    parser.add_argument("--keep", action="append", default=[], metavar="FINGERPRINT", help="stays in any case")
    parser.add_argument("--work-dir", default="work", help="local folder of the caches")
    arguments = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        print("\n" + retention(**vars(arguments)))
    except (PipelineError, ParameterTypeError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
