"""Batches, optimiser, trainer, training state and the torchrun launcher."""
