"""Reading what others wrote: PyTorch DCP directories, torch.save files, safetensors files, Hugging Face directories.

Each becomes the same `Contents` that a checkpoint of ours has, so that everything that reads those reads them too. No
module here imports torch, and none runs what a file says.
"""
