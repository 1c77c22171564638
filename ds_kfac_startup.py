"""What ``DS_KFAC=1`` in the environment does, by ``ds_kfac.pth``, in every Python process: wait for deepspeed.

Imports nothing: a process that never imports deepspeed pays microseconds.
``ds_kfac`` itself sees the variable and enables K-FAC when it is imported.
"""

import sys


class Finder:
    """Imports ds_kfac as soon as deepspeed has been executed. It stays in ``sys.meta_path``: transformers and others
    look for deepspeed (``find_spec``) long before they import it."""

    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed":
            return None
        specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module  # of this loader only, so that its class stays what others ask for

            def exec_module(module):
                execute(module)
                __import__("ds_kfac")  # does nothing where ds_kfac is what imports deepspeed

            spec.loader.exec_module = exec_module
        return spec


def install():
    """In front of all other finders; once."""
    if "deepspeed" not in sys.modules and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
