"""What DeepSpeed compiles at a first start on a CPU is said before, with the remedy."""

import logging

import deepspeed
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

from ds_kfac.engine.entry import COMPILED, _warn_of_compilation


def test_a_compilation_is_announced_until_it_is_done(monkeypatch, tmp_path):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    deepspeed.utils.logger.addHandler(handler)

    def texts() -> list[str]:
        said.clear()
        _warn_of_compilation.cache_clear()
        _warn_of_compilation()
        return list(said)

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, COMPILED, True)
    try:
        assert f"compiles {ShareMemCommBuilder.NAME} below {tmp_path}" in "".join(texts())
        (tmp_path / "py311_cpu" / COMPILED).mkdir(parents=True)
        assert "remove the file lock" in "".join(texts())
        (tmp_path / "py311_cpu" / COMPILED / f"{COMPILED}.so").touch()
        assert texts() == []
        (tmp_path / "py311_cpu" / COMPILED / f"{COMPILED}.so").unlink()
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, COMPILED, False)
        assert texts() == []
    finally:
        deepspeed.utils.logger.removeHandler(handler)
