"""Checkpoints in S3, Google Cloud Storage and Azure: `ObjectStore`, by the library obstore (extra `cloud`).

`storage.store` defines the interface. obstore is imported when the first URL is used.
"""
