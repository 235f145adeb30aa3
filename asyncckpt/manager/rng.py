"""`RngState`: the states of the random number generators of a training, as one value of a state dict."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RngState:
    """Saves and restores the generators of Python, numpy (if it has been imported), torch's CPU and all CUDA devices.

    Put one into the state: `{"model": model, "rng": RngState()}`. A save stores the states of the generators at the
    time of the call, and a load restores them. On several ranks each rank has its own: `PerRank(RngState())`. Not
    included are generators that you have made yourself (`torch.Generator`, `numpy.random.default_rng`,
    `random.Random`), and those of DataLoader workers, which the DataLoader seeds from torch's in each epoch.

    Generators that a checkpoint lacks keep their state: numpy's if numpy was not imported at the save, and those of
    devices that did not exist.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
                "gauss": gauss,
            },
            "torch": torch.get_rng_state(),
        }
        if "numpy" in sys.modules:
            import numpy.random

            state["numpy"] = self._of_numpy(numpy.random.get_state(legacy=False))
        if torch.cuda.is_available():
            state["cuda"] = {str(n): torch.cuda.get_rng_state(n) for n in range(torch.cuda.device_count())}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators' states.

        Args:
            state: A return value of `state_dict`; generators that it lacks keep their state.
        """
        if "python" in state:
            found = state["python"]
            random.setstate((found["version"], tuple(found["words"].tolist()), found["gauss"]))
        if "torch" in state:
            torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            self._load_numpy(state["numpy"])
        for number, value in state.get("cuda", {}).items():
            if torch.cuda.is_available() and int(number) < torch.cuda.device_count():
                torch.cuda.set_rng_state(value.cpu(), int(number))

    @staticmethod
    def _of_numpy(found: Any) -> dict[str, Any]:
        if found["bit_generator"] != "MT19937":  # the program has called numpy.random.set_bit_generator
            return {"state": found}
        return {
            "name": found["bit_generator"],
            "keys": torch.tensor(found["state"]["key"].tolist(), dtype=torch.int64, device="cpu"),
            "position": int(found["state"]["pos"]),
            "has_gauss": int(found["has_gauss"]),
            "cached": float(found["gauss"]),
        }

    @staticmethod
    def _load_numpy(found: dict[str, Any]) -> None:
        try:
            import numpy.random
        except ModuleNotFoundError:  # this process has no numpy, so no such generator
            return
        if "state" in found:
            numpy.random.set_state(found["state"])
            return
        keys = numpy.asarray(found["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((found["name"], keys, found["position"], found["has_gauss"], found["cached"]))
