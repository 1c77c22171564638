"""What DeepSpeed compiles at a first start on a CPU is said before, with the remedy."""

import deepspeed
import pytest

from ds_kfac.engine import first_start
from ds_kfac.engine.first_start import OP


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, OP, True)
    return tmp_path / "py311_cpu" / OP


def test_a_compilation_is_announced_until_it_is_done(cache):
    text = first_start.expected()
    assert "compiles deepspeed_shm_comm now" in text and "ahead: python -c" in text
    cache.mkdir(parents=True)
    (cache / "lock").touch()
    assert f"waits for {cache / 'lock'}" in first_start.expected()
    (cache / f"{OP}.so").touch()
    assert first_start.expected() is None


def test_nothing_is_said_where_nothing_is_compiled(cache, monkeypatch):
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, OP, False)
    assert first_start.expected() is None


def test_its_builder_has_the_name_that_is_printed():
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    assert ShareMemCommBuilder.NAME == OP
