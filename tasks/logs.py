"""Errors that a user can act on are logged as one line, not as a traceback."""

from __future__ import annotations

import logging

from speculators.errors import PipelineError

_PREFECT_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


class _PlainPipelineErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, PipelineError):
            record.exc_info = record.exc_text = None
            record.msg, record.args = f"Failed: {error}", None
        return True


def quiet_pipeline_errors() -> None:
    """Drop the traceback of every :class:`PipelineError` that Prefect logs; its message says all there is to say."""
    for name in _PREFECT_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _PlainPipelineErrors) for known in logger.filters):
            logger.addFilter(_PlainPipelineErrors())
