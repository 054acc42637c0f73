"""Runs: what a folder of one holds and how it is written; reading, comparing and repeating what was recorded."""
