"""What mounted file systems can do, and which saves they cannot carry. `LocalStore` commits as they allow.

`abilities` says what a mount can do and refuses saves that need more; `probe` finds it out by doing it.
"""
