"""What ``DS_KFAC=1`` in the environment does, by ``ds_kfac.pth``, in every Python process: wait for deepspeed, and say
at the end if a program has trained without K-FAC. The variable is read when deepspeed has been imported, so a script
may set it itself before.

Imports nothing of weight: a process that never imports deepspeed pays for this file and a finder, 0.1 ms.
``ds_kfac`` itself sees the variable, too, and enables K-FAC.
"""

import atexit
import os
import sys

NO = ("", "0", "false", "no", "off")
"""What DS_KFAC may be without asking for anything."""
NEVER_IMPORTED = (
    "deepspeed was never imported, and K-FAC works in DeepSpeed's engines only. Give the launcher or the trainer a "
    "DeepSpeed config: accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json, or "
    'TrainingArguments(deepspeed="ds_config.json")'
)
TOO_LATE = (
    "DS_KFAC was set when deepspeed had been imported already. Set it before, or call ds_kfac.enable() before the "
    "engine is built"
)


class Finder:
    """Imports ds_kfac as soon as deepspeed has been executed, where the variable asks for it then. It stays in
    ``sys.meta_path``: transformers and others look for deepspeed (``find_spec``) long before they import it."""

    asking = False  # another finder that asks all others, as this one does, must not be asked without end

    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed" or self.asking:
            return None
        self.asking = True
        try:
            others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
            spec = next((spec for f in others if (spec := f.find_spec(name, path, target)) is not None), None)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module  # of this loader only, so that its class stays what others ask for

            def exec_module(module):
                execute(module)
                if asked():
                    __import__("ds_kfac")  # does nothing where ds_kfac is what imports deepspeed

            spec.loader.exec_module = exec_module
        return spec


def asked():
    """Whether the variable is there and no no; ds_kfac refuses what is no yes either."""
    return os.environ.get("DS_KFAC", "").strip().lower() not in NO


def install():
    """In front of all other finders; once."""
    if "deepspeed" not in sys.modules and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    watch()


def watch():
    """Warn at exit, on rank 0, where K-FAC was asked for and no engine got it; once, however often it is called."""
    atexit.unregister(_say)
    atexit.register(_say)


def _say():
    entry = sys.modules.get("ds_kfac.engine.entry")
    if entry is not None:
        why = entry.unattached()
    else:
        why = asked() and (TOO_LATE if "deepspeed" in sys.modules else NEVER_IMPORTED)
    first = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
    failed = getattr(sys, "last_value", None) is not None  # which says enough
    if why and first and not failed and _optimizers():
        print(f"ds_kfac: WARNING: K-FAC was asked for, but this program has trained without it: {why}", file=sys.stderr)


def _optimizers():
    """Whether an optimizer of torch's was made here, as launchers and programs that do not train make none: torch marks
    the step of its class then."""
    kinds = [sys.modules["torch"].optim.Optimizer] if "torch.optim" in sys.modules else []
    while kinds:
        kind = kinds.pop()
        if getattr(kind.step, "hooked", False):
            return True
        kinds += kind.__subclasses__()
    return False
