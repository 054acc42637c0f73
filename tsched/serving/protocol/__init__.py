"""The wire: what clients send and read, one file an API. OpenAI's names, and vLLM's where OpenAI has none."""
