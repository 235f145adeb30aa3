"""How long the coordinator's request of the seal will be: with the names, and the leaves, of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from asyncckpt.format.layout import round_up

NAME_NBYTES = 128
"""What a leaf takes in tree and index beside its name, which is there twice. Measured: 20 to 60."""

MANY_RANKS = 8
"""Where plans are cached and say nothing, a rank is taken to have as much as the coordinator; at most so many of them,
since most leaves are on one rank. Chosen, not measured."""

LEAVES_NBYTES = 4 << 20
"""Room for the leaves of other ranks, of whose lengths plans say nothing; at most an eighth of the limit. Chosen, not
measured."""


@dataclass(kw_only=True, slots=True)
class SealRoom:
    """See the module. One per writer.

    Attributes:
        names_nbytes: Of the trees of all ranks, as the plans of this save say.
        others_have_leaves: Whether another rank has leaves that are no tensors.
        others_say_nothing: Whether the plan of another rank is empty, as cached ones are.
        last_nbytes: The last request that this writer had to seal; 0: none yet.
    """

    names_nbytes: int = 0
    others_have_leaves: bool = False
    others_say_nothing: bool = False
    last_nbytes: int = 0

    def note_plans(self, plans: Sequence[SavePlan], own: int) -> None:
        """Take in the plans of all ranks; the coordinator's is `own`."""
        names = {item.index.fqn for plan in plans for item in plan.items}
        self.names_nbytes = names_nbytes(names)
        others = [plan for number, plan in enumerate(plans) if number != own]
        self.others_say_nothing = any(not plan.items for plan in others)
        self.others_have_leaves = any(item.type is WriteItemType.BYTE_IO for plan in others for item in plan.items)

    def nbytes(self, own_names_nbytes: int, own_leaves_nbytes: int) -> int:
        """Return what names and leaves take at least, in whole pages."""
        return round_up(max(own_names_nbytes, self.names_nbytes) + own_leaves_nbytes)

    def likely_nbytes(self, own_names_nbytes: int, own_leaves_nbytes: int, world_size: int) -> int:
        """Return what they may well take, in whole pages: a wish, for which no save is refused."""
        as_ours = min(world_size, MANY_RANKS) * (own_names_nbytes + own_leaves_nbytes) if self.others_say_nothing else 0
        return max(self.nbytes(own_names_nbytes, own_leaves_nbytes), round_up(max(as_ours, self.last_nbytes)))

    def spare_nbytes(self, limit_nbytes: int) -> int:
        """Return what is added for leaves of other ranks to a slot of at most `limit_nbytes`, in whole pages."""
        return round_up(min(LEAVES_NBYTES, limit_nbytes // 8)) if self.others_have_leaves else 0


def names_nbytes(names: set[str]) -> int:
    """Return what leaves of these names take in tree and index."""
    return sum(2 * len(name.encode(errors="surrogatepass")) + NAME_NBYTES for name in names)
