"""Converting checkpoints between formats: what is copied, what each target can hold, verification, publishing.

`sources` reads what other libraries wrote and stands below `loading`; everything else here stands above it. No code
that a file names is imported or called.
"""
