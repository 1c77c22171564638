"""The code that implements ``DS_KFAC=1``. ``ds_kfac.pth`` runs it in every Python process.

If ``DS_KFAC`` asks for K-FAC, this file imports ds_kfac as soon as deepspeed has been imported, and
ds_kfac reads the variable and enables K-FAC. If the program has then trained without K-FAC, a
message says so when the program ends. The variable is read right after the import of deepspeed, so
a script may set it before this import. If the variable does not ask for K-FAC but the DeepSpeed
config does, ``deepspeed.initialize`` warns.

This file imports only small modules. In a process that never imports deepspeed, it costs 0.1 ms.
"""

import atexit
import os
import sys

NO = ("", "0", "false", "no", "off")
"""Values of ``DS_KFAC`` that do not ask for K-FAC."""
NEVER_IMPORTED = (
    "deepspeed was never imported, and K-FAC works in DeepSpeed's engines only. Give the launcher "
    "or the trainer a DeepSpeed config: "
    "accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json, or "
    'TrainingArguments(deepspeed="ds_config.json")'
)
TOO_LATE = (
    "DS_KFAC was set when deepspeed had been imported already. Set it before the import, or call "
    "ds_kfac.enable() before the "
    "engine is built"
)


UNREAD = (
    'the config has a "kfac" block, which DeepSpeed alone does not read: this engine trains '
    "without K-FAC. Import "
    "ds_kfac and call ds_kfac.initialize, or start with `python -m ds_kfac run`. If it is meant "
    'to train without, add "enabled": false to '
    "the block"
)
HOW = "import ds_kfac before deepspeed.initialize, or start with `python -m ds_kfac run`"
NAMED = f"ds_kfac: KFACAdamW is an optimizer of ds_kfac, not of DeepSpeed: {HOW}"
MISSPELT = (
    f'ds_kfac: optimizer.type "{{name}}" does not exist; did you mean "KFACAdamW"? If so, {HOW}'
)


def is_misspelt(name: str) -> bool:
    """Return whether a nonexistent optimizer name is probably a misspelling of KFACAdamW.

    True for "KFAC", "K-FAC" and "KFAdamW"; False for "AdamW".
    """
    import difflib  # imported here because every Python process runs this file

    letters = name.lower().replace("-", "").replace("_", "")
    is_close = difflib.SequenceMatcher(None, letters, "kfacadamw").ratio() >= 0.8
    return letters != "adamw" and ("kfac" in letters or is_close)


class Finder:
    """Import finder that imports ds_kfac right after deepspeed, if ``DS_KFAC`` then asks for K-FAC.

    The finder stays in ``sys.meta_path``, because transformers and other packages look for
    deepspeed (``find_spec``) long before they import it.
    """

    # prevents endless recursion if another finder, like this one, asks all other finders
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
            # patch this loader only: other code may check the loader's class
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if asked():
                    __import__("ds_kfac")  # does nothing if ds_kfac itself imports deepspeed
                else:
                    watch_initialize(module)

            spec.loader.exec_module = exec_module
        return spec


def asked():
    """Return whether ``DS_KFAC`` is set to anything but a word for no. ds_kfac later refuses words
    that mean neither yes nor no."""
    return os.environ.get("DS_KFAC", "").strip().lower() not in NO


def install():
    """Install the finder in front of all other finders. Further calls change nothing."""
    if "deepspeed" not in sys.modules and not any(
        isinstance(finder, Finder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, Finder())
    watch()


def watch_initialize(deepspeed):
    """Make ``deepspeed.initialize`` warn if its config has a "kfac" block that nothing reads.

    If ds_kfac is imported, it reads the block, and its own call of ``deepspeed.initialize`` causes
    no warning.
    """
    from functools import wraps  # costs nothing here, because deepspeed has imported it

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
    """Context for a call of DeepSpeed's own ``initialize``. If DeepSpeed refuses an optimizer named
    KFACAdamW, or a misspelling of it, a note on what to do is added to the error.

    Attributes:
        is_outermost: whether this context is not inside another one. The context of
            ``watch_initialize`` may be inside the one of ds_kfac.
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
    """Warn at exit, on rank 0, if K-FAC was asked for and no engine got it. The warning appears
    once, however often this function is called."""
    atexit.unregister(_say)
    atexit.register(_say)


def _say():
    entry = sys.modules.get("ds_kfac.engine.entry")
    if entry is not None:
        why = entry.unattached()
    else:
        why = asked() and (TOO_LATE if "deepspeed" in sys.modules else NEVER_IMPORTED)
    failed = getattr(sys, "last_value", None) is not None  # the error message is enough
    if why and not failed and _optimizers():
        _warn(f"K-FAC was asked for, but this program has trained without it: {why}")


def _warn(text):
    """Print a warning on rank 0. The environment says which rank this is."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        print(f"ds_kfac: WARNING: {text}", file=sys.stderr, flush=True)


def _optimizers():
    """Return whether a torch optimizer was created in this process. Launchers and programs that do
    not train create none. When an optimizer is created, torch marks the ``step`` of its class."""
    kinds = [sys.modules["torch"].optim.Optimizer] if "torch.optim" in sys.modules else []
    while kinds:
        kind = kinds.pop()
        if getattr(kind.step, "hooked", False):
            return True
        kinds += kind.__subclasses__()
    return False
