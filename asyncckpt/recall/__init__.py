"""Snapshots that lie in the memory of this node's worker, for those who load them. Imports no torch."""
