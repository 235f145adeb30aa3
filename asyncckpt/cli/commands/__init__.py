"""The commands of `asyncckpt`, one module each: a docstring, `EXAMPLES`, `configure(parser)` and `run(args)`.

The docstring is what `--help` says of the command; `configure` adds its arguments; `run` returns the exit code.
What several commands need is in `asyncckpt.cli`. No module here imports another one, nor torch at the top.
"""
