"""Adapters for training frameworks. Each imports its framework only when it is itself imported.

They save what the framework would have saved, under the names that it looks for, so that it resumes without this
package (docs/adr/0033-stock-layouts-by-export.md).
"""
