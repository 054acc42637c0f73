"""The engine: a plan of the scheduler becomes a batch, a forward, tokens."""
