"""Adapters for training frameworks. Each module imports its framework; nothing else imports the modules.

They save the framework's own files under the framework's own names, so that a training can resume without this package
(docs/adr/0033-stock-layouts-by-export.md). `torchdata` saves nothing: it brings data loaders to another world size.
"""
