"""The page of `asyncckpt report`: `history` joins events and manifests, `charts` draws, `page` writes the HTML.

The files are read by `asyncckpt.cli.commands.report`. Imports no torch; only `charts` needs matplotlib.
"""
