"""How the files of a checkpoint are called: a name of the model never becomes a path.

Module names may hold anything: "/" (keys of a ModuleDict), capitals that differ in nothing else, hundreds of letters.
A name of small letters, digits, "_", "." and "-" is its file's name as it is; any other becomes what is readable of it
and a hash, joined by "~", which the first kind does not have. So two names are two files, on file systems that ignore
case too.
"""

import hashlib
import re
from collections.abc import Iterable

PLAIN = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,119}")
SAVE_ID = re.compile(r"[0-9a-f]{12}")
"""Of a save, and the name of its folder."""


def stem(name: str) -> str:
    """What the files of a layer begin with; at most 120 characters."""
    if PLAIN.fullmatch(name):
        return name
    if not name:
        return "~root"
    readable = re.sub(r"[^a-z0-9_.-]", "_", name.lower())[:80].lstrip(".")
    return f"{readable}~{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"


def layer_file(layer: str) -> str:
    return f"{stem(layer)}.layer.pt"


def factor_file(key: str) -> str:
    """Args:
    key: "<layer>/A" or "<layer>/G".
    """
    return f"{stem(key[:-2])}.{key[-1]}.factor.pt"


def check_names(names: Iterable[str]) -> None:
    """At attach, not hours later at the first save.

    Args:
        names: of all layers in checkpoints.

    Raises:
        ValueError: two layers would be saved in one file.
    """
    seen: dict[str, str] = {}
    for name in names:
        file = layer_file(name)
        if file in seen:
            raise ValueError(
                f"ds_kfac cannot attach: checkpoints would hold {seen[file]!r} and {name!r} under one name, {file}; "
                "rename one of the modules, or exclude it (kfac.layers.exclude)"
            )
        seen[file] = name
