"""Prefect flows: what runs after what."""

import logging
import os
from pathlib import Path

# Read by Prefect when it is imported: the library's log lines belong into the flow run's log, and the local server of a
# first run makes its database, which takes longer than Prefect's default of 20 s on two cores.
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "speculators,tasks")
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
for _name in ("speculators", "tasks"):
    logging.getLogger(_name).setLevel(logging.INFO)
# Prefect makes its home, but not the folders above it.
if _home := os.environ.get("PREFECT_HOME"):
    Path(_home).mkdir(parents=True, exist_ok=True)
