"""The ops: one folder each, with its contract and one file per variant."""
