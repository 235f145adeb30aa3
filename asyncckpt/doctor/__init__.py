"""The checks of `asyncckpt doctor`: of this machine, of a directory, of a place in an object store.

Each check yields `findings.Finding`s; the command `asyncckpt.cli.commands.doctor` prints them. Imports no torch.
"""
