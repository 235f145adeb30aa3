"""Which checkpoints of a directory stay, and how the others go. Imports no torch."""
