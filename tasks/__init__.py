"""Prefect tasks: one stage a file. Progress, MLflow and Prefect artifacts live here, the work itself in speculators."""
