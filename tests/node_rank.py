"""One rank on a node: a program that saves when it is told to, by JSON lines on stdin, and says how that ended."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from asyncckpt import AsyncCheckpointer


def state_of(step: int) -> dict[str, Any]:
    """What every rank holds."""
    generator = torch.Generator().manual_seed(step)
    return {"large": torch.randn(2000, 300, generator=generator), "step": step}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(endpoint: str, commit_timeout_s: float) -> None:
    """Serve until stdin ends."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with AsyncCheckpointer(endpoint=endpoint, commit_timeout_s=commit_timeout_s) as checkpointer:
        say(ready=dist.get_rank())
        for line in sys.stdin:
            order = json.loads(line)
            began = time.monotonic()
            handle = checkpointer.save(state_of(order["step"]), order["path"])
            if handle.staged.exception(60) is None:
                say(staged=order["step"])
            error = handle.written.exception(120)
            facts = {} if error is None else error.facts()  # type: ignore[attr-defined]
            name = "" if error is None else type(error).__name__
            say(error=name, text=str(error or ""), facts=facts, seconds=time.monotonic() - began)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
