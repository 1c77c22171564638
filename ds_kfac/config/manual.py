"""Every key of the ``"kfac"`` block as Markdown, made from the models' docstrings: docs/config.md. And as a JSON
schema, for editors."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from ds_kfac.config.keys import KFACConfig
from ds_kfac.config.parse import KEY
from ds_kfac.config.values import OneOf, holds_value
from ds_kfac.schedule.timetable import Value

HEAD = """\
# The "kfac" block

<!-- Made by `DS_ACCELERATOR=cpu python -m ds_kfac config > docs/config.md` from the docstrings in ds_kfac/config/. -->

Every key is optional. `null`, or leaving a key out, chooses the default. An unknown key is an error that names the
nearest valid one; a key without effect is a warning in the attach report. `"auto"` is the same as `null`; Hugging
Face's Trainer and Accelerate themselves fail on one that they do not fill. `python -m ds_kfac config` prints this page.

**The six that are changed most.** `{}` is a good block; these are what a task may ask for:

| key | when |
|---|---|
| `layers.exclude` | a layer that is not to be preconditioned, such as a tiny new head |
| `factor.update_interval` | statistics cost too much (raise it), or the batch is large and steps are few (lower it) |
| `eigenbasis.refresh_interval` | decompositions cost too much; a multiple of the one before |
| `damping` | another optimizer than KFACAdamW: larger if the loss is noisy or diverges |
| `preconditioner.graft` | another optimizer than KFACAdamW, whose learning rate is to carry over: "norm" |
| `report` | "full" lists every layer at attach |

**In an editor.** `python -m ds_kfac schema > kfac.schema.json` writes a JSON schema with all keys, types and schedules.
In VS Code: `"json.schemas": [{"fileMatch": ["ds_config*.json"], "url": "./kfac.schema.json"}]`. Whether a config fits a
model is said by `python -m ds_kfac check --config ds_config.json --model hf:PATH`.

**Schedules.** A key of type *schedule* takes a number, or an object that gives its value at each applied step since the
start of the run. `"linear"`, `"cosine"` and `"exponential"` go from `start` to `end` over `steps` steps, after `delay`
steps (default 0); `"exponential"` needs positive ends. `"piecewise"` has one value more than steps: here 5, then 20
from step 100 on, then 50 from step 1000 on. Intervals are rounded.

```json
"kfac": {
  "damping": {"value": {"schedule": "cosine", "start": 3, "end": 1, "steps": 200, "delay": 50}},
  "factor": {"update_interval": {"schedule": "piecewise", "values": [5, 20, 50], "steps": [100, 1000]}}
}
```
"""
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def manual() -> str:
    """The whole page. Keys of the top level come first, then a section for each block."""
    fields = KFACConfig.model_fields.items()
    parts = [HEAD, *_table("", [(name, field) for name, field in fields if _block(field) is None])]
    for name, field in fields:
        if block := _block(field):
            parts += [f"\n## {name}\n", _text(block.__doc__) + "\n", *_table(f"{name}.", block.model_fields.items())]
    return "\n".join(parts)


def _table(prefix: str, fields: Any) -> Iterator[str]:
    yield "| key | type | default | |\n|---|---|---|---|"
    for name, field in fields:
        if not field.description:
            raise ValueError(f"kfac.{prefix}{name} has no docstring")
        row = (f"`{prefix}{name}`", _type(field), f"`{_default(field.default)}`", _text(field.description))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _block(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _text(docstring: str | None) -> str:
    """A docstring on one line, in Markdown."""
    return " ".join((docstring or "").split()).replace("``", "`")


def _type(field: FieldInfo) -> str:
    bounds = [f"{sign} {getattr(part, name)}" for part in _metadata(field) for name, sign in BOUNDS.items()
              if getattr(part, name, None) is not None]  # fmt: skip
    tables = [check.table for part in field.metadata if isinstance(check := getattr(part, "func", None), OneOf)]
    named = ", ".join(f"`{json.dumps(name)}`" for name in tables[0]) if tables else _named(field.annotation)
    return ", ".join([named, *bounds])


def _metadata(field: FieldInfo) -> list[Any]:
    """Bounds of a field, also of ``Annotated[..] | None``."""
    return [*field.metadata, *(m for part in get_args(field.annotation) for m in getattr(part, "__metadata__", ()))]


def _named(kind: Any) -> str:
    """A type in the words of JSON."""
    if holds_value(kind):
        return "schedule"
    if get_origin(kind) is Annotated:
        return _named(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_named(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "object"
    parts = [part for part in get_args(kind) if part is not type(None)]
    if parts and (get_origin(kind) is Union or len(parts) < len(get_args(kind)) or type(kind).__name__ == "UnionType"):
        return " or ".join(_named(part) for part in parts)
    return {bool: "true, false", int: "integer", float: "number", str: "string"}.get(kind, str(kind))


def _default(value: Any) -> str:
    if isinstance(value, Value):
        value = value.at(0)
        value = int(value) if float(value).is_integer() else value
    return json.dumps(value)


class _Schema(GenerateJsonSchema):
    def encode_default(self, default: Any) -> Any:
        if isinstance(default, BaseModel):
            return {}  # each key has its own default
        if not isinstance(default, Value):
            return super().encode_default(default)
        value = default.at(0)
        return int(value) if float(value).is_integer() else value


def schema() -> str:
    """Of a whole DeepSpeed config, of which it knows the ``"kfac"`` block only."""
    block = KFACConfig.model_json_schema(schema_generator=_Schema)
    definitions = block.pop("$defs")
    top = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "DeepSpeed config with ds_kfac"}
    return json.dumps({**top, "type": "object", "properties": {KEY: block}, "$defs": definitions}, indent=2)
