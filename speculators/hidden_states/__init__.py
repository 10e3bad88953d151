"""Hidden states of the verifier: their format in the store, writer, reader and extraction by vLLM."""
