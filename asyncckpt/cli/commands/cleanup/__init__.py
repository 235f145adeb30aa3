"""The commands that remove checkpoints and leftovers, and the one that protects checkpoints: `gc`, `prune`, `pin`."""
