"""Readers of other formats: DCP directories, files of `torch.save`, safetensors files, Hugging Face directories.

Each reader returns `Contents`, as for an asyncckpt checkpoint, so that all code that reads checkpoints reads every
format. No module here imports torch, and none runs code that a file names.
"""
