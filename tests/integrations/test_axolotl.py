"""The plugin, by the two calls that Axolotl's plugin manager makes (0.19.0)."""

import importlib
import sys
import types
from types import SimpleNamespace

import pytest

import ds_kfac
from ds_kfac.engine import entry

pytest.importorskip("transformers", reason="needs ds_kfac[integrations]")


@pytest.fixture
def plugin(monkeypatch):
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = object
    yield importlib.import_module("ds_kfac.integrations.axolotl").KFACPlugin()
    ds_kfac.disable()
    sys.modules.pop("ds_kfac.integrations.axolotl", None)


def test_the_plugin_enables_and_logs_and_asks_for_deepspeed(plugin):
    from ds_kfac.integrations.transformers import KFACCallback

    with pytest.raises(ValueError, match="set deepspeed"):
        plugin.pre_model_load(SimpleNamespace(deepspeed=None))
    assert not entry._enabled
    plugin.pre_model_load(SimpleNamespace(deepspeed="ds_config.json"))
    assert entry._enabled
    callbacks = ["the Trainer's own reporter"]
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))
    plugin.post_trainer_create(SimpleNamespace(), trainer)
    assert isinstance(callbacks[0], KFACCallback) and len(callbacks) == 2
