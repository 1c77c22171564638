"""Modules whose code is a text of the test: what reads sources finds it, and a case is a line of a
table."""

import linecache
import sys
import textwrap
from itertools import count
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

_NUMBERS = count()


def written(code: str, base: type[nn.Module] = nn.Module, **names: object) -> type[nn.Module]:
    """A class of its own with this text: methods, or the lines of ``forward(self, x)``.

    Args:
        names: that the text knows besides torch, nn and F.
    """
    code = textwrap.dedent(code).strip()
    if not code.startswith(("def ", "@")):
        code = f"def forward(self, x):\n{textwrap.indent(code, '    ')}"
    name = f"tests.model.written_{next(_NUMBERS)}"
    text = f"class Written(Base):\n{textwrap.indent(code, '    ')}\n"
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    vars(module).update(Base=base, torch=torch, nn=nn, F=F, **names)
    sys.modules[name] = module
    lines = text.splitlines(keepends=True)
    linecache.cache[module.__file__] = len(text), None, lines, module.__file__
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module.Written


def module(code: str, base: type[nn.Module] = nn.Module, **parts: object) -> nn.Module:
    """A module of :func:`written`; ``parts`` are shapes of its parameters, or other attributes."""
    torch.manual_seed(2)
    made = written(code, base)()
    for name, part in parts.items():
        is_shape = isinstance(part, tuple)
        setattr(made, name, nn.Parameter(torch.randn(part) / 3) if is_shape else part)
    return made
