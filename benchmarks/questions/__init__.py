"""One module a question, with a `QUESTION`; `python -m benchmarks --help` lists them."""
