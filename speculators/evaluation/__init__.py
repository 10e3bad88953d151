"""Acceptance measured in vLLM, the reference decoder, and plots."""
