"""Requests that a server is given, and the timed rounds in which it serves them: an arm's engine or a peer."""
