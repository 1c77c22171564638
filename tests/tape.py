"""A recorder for CPUs (``ds_kfac/update/recorded.py``): it writes down every operation with the
tensors that it was given, and repeats them. As in a CUDA graph nothing but the contents of tensors
can be different the next time."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_kfac.plan import plan as planning
from ds_kfac.update import recorded


class Tape(TorchDispatchMode):
    """Operations in their order, and what the tensors held that they were given from outside: when
    a graph is captured nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable, tuple, dict, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self.made and 0 not in x.stride():
                self.before.setdefault(id(x), (x, x.clone()))
        result = operation(*args, **(kwargs or {}))
        self.made |= {
            id(x) for x in tree_leaves(result) if isinstance(x, Tensor) and id(x) not in self.before
        }
        self.operations.append((operation, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """All again, with results in new memory, which are then copied over the old ones."""
        now: dict[int, Tensor] = {}

        def current(tensor: Tensor) -> Tensor:
            return now.get(id(tensor), tensor)

        for operation, args, kwargs, result in self.operations:
            args, kwargs = (tree_map_only(Tensor, current, part) for part in (args, kwargs))
            again = operation(*args, **kwargs)
            now |= {
                id(old): new
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True)
                if isinstance(old, Tensor)
            }
        for *_, result in self.operations:
            for old in tree_leaves(result):
                new = now[id(old)] if isinstance(old, Tensor) else old
                if new is not old and 0 not in old.stride():
                    old.copy_(new)


replays = [0]


def tape(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    with Tape() as made:
        result = function()
    for old, values in reversed(made.before.values()):
        old.copy_(values)
    made.before.clear()

    def replay() -> None:
        replays[0] += 1
        made.replay()

    return replay, result


@contextmanager
def taped(steady: int = 1):
    """Steps of KFACAdamW on a CPU are recorded, and their layers stepped together, as on a GPU."""
    replays[0] = 0
    with (
        patch.dict(recorded.RECORDERS, cpu=tape),
        patch.object(recorded, "STEADY", steady),
        patch.object(planning, "batched", lambda device, method: method.rotates),
    ):
        yield replays
