"""From any kind of checkpoint to any other: what is written, how, and the proof that it arrived."""
