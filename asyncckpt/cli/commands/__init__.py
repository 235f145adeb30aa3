"""The commands of `asyncckpt`, one module each: a docstring, `EXAMPLES`, `configure(parser)` and `run(args)`.

`--help` prints the docstring; `configure` adds the arguments; `run` returns the exit code. Code that several commands
need is in `asyncckpt.cli`. No module here imports another one, or
imports torch at the top.
"""
