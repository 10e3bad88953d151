"""Starting, watching and stopping vLLM, and talking to it."""
