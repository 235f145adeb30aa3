"""The writer daemon: installed as `asyncckpt_worker`, started as `asyncckpt-worker`. Never imports torch."""
