"""The plugin, by Axolotl's own plugin manager; where Axolotl is missing, by the two calls that it
makes (0.19.0)."""

import importlib
import sys
import types
from types import SimpleNamespace

import pytest

import ds_kfac
from ds_kfac.engine import entry

pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")
NAME = "ds_kfac.integrations.axolotl.KFACPlugin"


class Manager:
    """Of Axolotl's PluginManager what the plugin meets."""

    def register(self, name: str) -> None:
        module, kind = name.rsplit(".", 1)
        plugin = getattr(importlib.import_module(module), kind)()
        self.pre_model_load = plugin.pre_model_load
        self.post_trainer_create = plugin.post_trainer_create


@pytest.fixture
def manager(monkeypatch):
    try:
        from axolotl.integrations.base import PluginManager

        found = PluginManager.get_instance()
    except ImportError as missing:
        print(f"Axolotl's interface as read, not the package: {missing}")
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = object
        found = Manager()
    found.register(NAME)
    yield found
    ds_kfac.disable()
    sys.modules.pop("ds_kfac.integrations.axolotl", None)


def test_the_plugin_enables_and_logs(manager):
    from ds_kfac.integrations.transformers import KFACCallback

    assert not entry._enabled
    manager.pre_model_load(SimpleNamespace(deepspeed="ds_config.json"))
    assert entry._enabled
    callbacks = ["the Trainer's own reporter"]
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))
    manager.post_trainer_create(SimpleNamespace(), trainer)
    assert isinstance(callbacks[0], KFACCallback) and len(callbacks) == 2


def test_without_deepspeed_it_says_so(manager):
    with pytest.raises(ValueError, match="set deepspeed"):
        manager.pre_model_load(SimpleNamespace(deepspeed=None))
