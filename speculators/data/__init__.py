"""Prompts in, conversations, token ids, loss masks and vocabulary mappings out."""
