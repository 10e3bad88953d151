"""Checkpoint formats: what vLLM serves, and what training resumes from."""
