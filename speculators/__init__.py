"""Retraining speculative-decoding drafters: the library and the command. No Prefect, no MLflow in here."""
