"""All keys of the ``"kfac"`` block and KFACAdamW's optimizer block: a JSON schema, and from it
docs/config.md."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from ds_kfac.config.keys import NAME, KFACConfig, OptimizerParams
from ds_kfac.config.values import AUTO, KEY
from ds_kfac.schedule.timetable import Value

PARAMS = "optimizer.params"
OPTIMIZER = """\

# The optimizer block

`"optimizer": {"type": "KFACAdamW", "params": {"lr": 0.002, "betas": [0.9, 0.95]}}`, or an object with the same
parameters: `ds_kfac.KFACAdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))`. Groups of parameters may have an `lr`,
`betas`, `eps` and `weight_decay` of their own ([frameworks](frameworks.md)).
"""  # noqa: E501
HEAD = """\
# The "kfac" block

<!-- Made by `DS_ACCELERATOR=cpu python -m ds_kfac config > docs/config.md` from the docstrings in ds_kfac/config/. -->

Every key is optional. `null`, or leaving a key out, chooses the default. An unknown key is an error that names the
nearest valid one; a key without effect is a warning in the attach report. `"auto"` is the same as `null`; Hugging
Face's Trainer and Accelerate themselves fail on one that they do not fill. `python -m ds_kfac config` prints this page.

**Those that are changed most.** `{}` is a good block; these are what a task may ask for:

| key | when |
|---|---|
| `layers.exclude` | a layer that is not to be preconditioned, such as a tiny new head |
| `factor.update_interval` | statistics cost too much (raise it), or the batch is large and steps are few (lower it) |
| `eigenbasis.refresh_interval` | decompositions cost too much; a multiple of the one before |
| `damping` | another optimizer than KFACAdamW: larger if the loss is noisy or diverges |
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
"""  # noqa: E501
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def manual(_: object = None) -> str:
    """The page: keys of the top level, then a section for each block."""
    whole = json_of(KFACConfig)
    blocks = {
        name: key["$ref"].rpartition("/")[2]
        for name, key in whole["properties"].items()
        if "$ref" in key
    }
    top = {name: key for name, key in whole["properties"].items() if name not in blocks}
    parts = [HEAD, *table("", top)]
    for name, kind in blocks.items():
        block = whole["$defs"][kind]
        parts += [
            f"\n## {name}\n",
            _text(block["description"]) + "\n",
            *table(f"{name}.", block["properties"]),
        ]
    parts += [OPTIMIZER, _text(OptimizerParams.__doc__ or "") + "\n"]
    return "\n".join([*parts, *table(f"{PARAMS}.", json_of(OptimizerParams)["properties"])])


def json_of(model: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema, with all defaults."""
    return model.model_json_schema(schema_generator=_Schema)


def table(prefix: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a Markdown table, from the schemas of keys."""
    yield "| key | type | default | |\n|---|---|---|---|"
    for name, key in keys.items():
        if "description" not in key:
            raise ValueError(
                f"{'' if prefix.startswith(PARAMS) else 'kfac.'}{prefix}{name} has no docstring"
            )
        row = (
            f"`{prefix}{name}`",
            _type(key),
            f"`{json.dumps(key['default'])}`",
            _text(key["description"]),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _text(docstring: str) -> str:
    """A docstring on one line, in Markdown."""
    return " ".join(docstring.split()).replace("``", "`")


def _type(key: Mapping[str, Any]) -> str:
    """A key's type in words."""
    kinds = [kind for kind in key.get("anyOf", ()) if kind.get("type") != "null"]
    if any("properties" in kind for kind in kinds):
        return "schedule"
    if kinds:
        return " or ".join(map(_type, kinds))
    if names := key.get("enum", [key["const"]] if "const" in key else []):
        return ", ".join(f"`{json.dumps(name)}`" for name in names)
    kind = f"list of {_type(key['items'])}" if key["type"] == "array" else key["type"]
    bounds = [f"{sign} {key[bound]}" for bound, sign in BOUNDS.items() if bound in key]
    return ", ".join([{"boolean": "true, false"}.get(kind, kind), *bounds])


class _Schema(GenerateJsonSchema):
    def encode_default(self, default: Any) -> Any:
        if isinstance(default, BaseModel):
            return {}  # each key has its own default
        if not isinstance(default, Value):
            return super().encode_default(default)
        value = default.at(0)
        return int(value) if float(value).is_integer() else value


def schema(_: object = None) -> str:
    """JSON schema of a DeepSpeed config; it only describes the ``"kfac"`` block, and KFACAdamW's
    optimizer block."""
    block = json_of(KFACConfig)
    definitions = block.pop("$defs")
    top = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed config with ds_kfac",
    }
    return json.dumps(
        {**top, "type": "object", "properties": {KEY: block, **_optimizer()}, "$defs": definitions},
        indent=2,
    )


def _optimizer() -> dict[str, Any]:
    """Schema of the optimizer block, which leaves other optimizers' parameters alone."""
    open_ = {"enum": [None, AUTO]}
    params = {
        name: {"description": key["description"], "default": key["default"], "anyOf": [key, open_]}
        for name, key in json_of(OptimizerParams)["properties"].items()
    }
    ours = {"type": "object", "properties": params, "additionalProperties": False}
    return {
        "optimizer": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "params": {"type": "object"}},
            "if": {"properties": {"type": {"const": NAME}}, "required": ["type"]},
            "then": {"properties": {"params": ours}},
        }
    }
