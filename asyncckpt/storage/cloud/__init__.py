"""Checkpoints in S3, Google Cloud Storage and Azure: `ObjectStore`, by the library obstore (extra `cloud`).

Nothing here imports obstore before a URL is used. What a store is, and what every store must do, says `storage.store`.
"""
