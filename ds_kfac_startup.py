"""What ``DS_KFAC=1`` in the environment does, by ``ds_kfac.pth``, in every Python process: wait for
deepspeed, and say at the end if a program has trained without K-FAC. The variable is read when
deepspeed has been imported, so a script may set it itself before. Where it does not ask for K-FAC,
``deepspeed.initialize`` says if its config does.

Imports nothing of weight: a process that never imports deepspeed pays for this file and a finder,
0.1 ms. ``ds_kfac`` itself sees the variable, too, and enables K-FAC.
"""

import atexit
import os
import sys

NO = ("", "0", "false", "no", "off")
"""What DS_KFAC may be without asking for anything."""
NEVER_IMPORTED = (
    "deepspeed was never imported, and K-FAC works in DeepSpeed's engines only. Give the launcher "
    "or the trainer a DeepSpeed config: "
    "accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json, or "
    'TrainingArguments(deepspeed="ds_config.json")'
)
TOO_LATE = (
    "DS_KFAC was set when deepspeed had been imported already. Set it before, or call "
    "ds_kfac.enable() before the "
    "engine is built"
)


UNREAD = (
    'the config has a "kfac" block, which DeepSpeed alone does not read: this engine trains '
    "without K-FAC. Import "
    'ds_kfac and call ds_kfac.initialize, or start with `python -m ds_kfac run`. "kfac": '
    '{"enabled": false} says '
    "that it is meant"
)
HOW = "import ds_kfac before deepspeed.initialize, or start with `python -m ds_kfac run`"
NAMED = f"ds_kfac: KFACAdamW is an optimizer of ds_kfac, not of DeepSpeed: {HOW}"
MISSPELT = (
    f'ds_kfac: optimizer.type "{{name}}" does not exist; did you mean "KFACAdamW"? For that {HOW}'
)


def is_misspelt(name: str) -> bool:
    """Return whether a name of an optimizer that does not exist is probably meant to be KFACAdamW.

    "KFAC", "K-FAC" and "KFAdamW" are; "AdamW" is not.
    """
    import difflib  # here, because every process that starts runs this file

    letters = name.lower().replace("-", "").replace("_", "")
    is_close = difflib.SequenceMatcher(None, letters, "kfacadamw").ratio() >= 0.8
    return letters != "adamw" and ("kfac" in letters or is_close)


class Finder:
    """Imports ds_kfac as soon as deepspeed has been executed, where the variable asks for it then.
    It stays in ``sys.meta_path``: transformers and others look for deepspeed (``find_spec``) long
    before they import it."""

    # another finder that asks all others, as this one does, must not be asked without end
    asking = False

    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed" or self.asking:
            return None
        self.asking = True
        try:
            others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
            spec = next(
                (spec for f in others if (spec := f.find_spec(name, path, target)) is not None),
                None,
            )
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            # of this loader only, so that its class stays what others ask for
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if asked():
                    __import__("ds_kfac")  # does nothing where ds_kfac is what imports deepspeed
                else:
                    watch_initialize(module)

            spec.loader.exec_module = exec_module
        return spec


def asked():
    """Whether the variable is there and no no; ds_kfac refuses what is no yes either."""
    return os.environ.get("DS_KFAC", "").strip().lower() not in NO


def install():
    """In front of all other finders; once."""
    if "deepspeed" not in sys.modules and not any(
        isinstance(finder, Finder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, Finder())
    watch()


def watch_initialize(deepspeed):
    """Have ``deepspeed.initialize`` say what it means that a config asks for K-FAC and nobody reads
    that. Where ds_kfac is imported it does read it, and its own call goes through this
    unchanged."""
    from functools import wraps  # deepspeed has imported it

    plain = deepspeed.initialize

    @wraps(plain)
    def initialize(*args, **kwargs):
        with InitializeCall() as call:
            result = plain(*args, **kwargs)
        engine = result[0]
        block = (getattr(engine, "config", None) or {}).get("kfac")
        is_off = isinstance(block, dict) and block.get("enabled") is False
        if call.is_outermost and block is not None and not is_off and engine.optimizer is not None:
            _warn(UNREAD)
        return result

    deepspeed.initialize = initialize


class InitializeCall:
    """Wraps a call of DeepSpeed's own ``initialize``: if that refuses an optimizer that is ours, or
    nearly, its error says so.

    Attributes:
        is_outermost: whether no other one is around this one, as ds_kfac's is around what
            ``watch_initialize`` makes.
    """

    depth = 0

    def __enter__(self):
        self.is_outermost = InitializeCall.depth == 0
        InitializeCall.depth += 1
        return self

    def __exit__(self, kind, error, traceback):
        InitializeCall.depth -= 1
        name = str(error).partition(" ")[0]
        is_ours = name == "KFACAdamW" or is_misspelt(name)
        if not (self.is_outermost and is_ours and isinstance(error, AssertionError)):
            return
        note = NAMED if name == "KFACAdamW" else MISSPELT.format(name=name)
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            error.args = (f"{error}\n{note}",)


def watch():
    """Warn at exit, on rank 0, where K-FAC was asked for and no engine got it; once, however often
    it is called."""
    atexit.unregister(_say)
    atexit.register(_say)


def _say():
    entry = sys.modules.get("ds_kfac.engine.entry")
    if entry is not None:
        why = entry.unattached()
    else:
        why = asked() and (TOO_LATE if "deepspeed" in sys.modules else NEVER_IMPORTED)
    failed = getattr(sys, "last_value", None) is not None  # which says enough
    if why and not failed and _optimizers():
        _warn(f"K-FAC was asked for, but this program has trained without it: {why}")


def _warn(text):
    """On rank 0, as far as the environment says which that is."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(f"ds_kfac: WARNING: {text}", file=sys.stderr, flush=True)


def _optimizers():
    """Whether an optimizer of torch's was made here, as launchers and programs that do not train
    make none: torch marks the step of its class then."""
    kinds = [sys.modules["torch"].optim.Optimizer] if "torch.optim" in sys.modules else []
    while kinds:
        kind = kinds.pop()
        if getattr(kind.step, "hooked", False):
            return True
        kinds += kind.__subclasses__()
    return False
