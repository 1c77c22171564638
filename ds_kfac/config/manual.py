"""Make a JSON schema of all keys of the ``"kfac"`` block and of KFACAdamW's optimizer block, and
make the page docs/reference/config.md from this schema."""

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

## The optimizer block

In a DeepSpeed config:

```json
"optimizer": {
  "type": "KFACAdamW",
  "params": {"lr": 0.002, "betas": [0.9, 0.95]}
}
```

`ds_kfac.KFACAdamW(model.parameters(), lr=2e-3, ...)` takes the same parameters. Parameter groups
may have their own `lr`, `betas`, `eps` and `weight_decay` ([frameworks](../howto/frameworks.md)).
"""
HEAD = """\
# Config

Which keys do the `"kfac"` block and the optimizer block of KFACAdamW have, and when would you
change one?

<!-- Made by `DS_ACCELERATOR=cpu python -m ds_kfac config > docs/reference/config.md`, from the
docstrings in ds_kfac/config/keys.py and the reasons in ds_kfac/config/manual.py. -->

Every key is optional: `{}` is a good block. `null` and `"auto"` mean the same as leaving a key out,
but Hugging Face's Trainer and Accelerate fail on an `"auto"` in this block. An unknown key raises
an error that names the nearest valid key. If a key has no effect in your run, the
[attach report](attach_report.md) warns about it.

These keys are changed most often:

| key | change it when |
|---|---|
| `layers.exclude` | a layer, such as a tiny new head, should not be preconditioned |
| `factor.update_interval` | statistics cost too much (raise it), or steps are few (lower it) |
| `eigenbasis.refresh_interval` | decompositions cost too much (raise it) |
| `damping` | you keep your own optimizer, and the loss is noisy or diverges (raise it) |
| `report` | you want the attach report to list every layer: `"full"` |

`python -m ds_kfac schema > kfac.schema.json` writes a JSON schema for editors. In VS Code, add:

```json
"json.schemas": [
  {"fileMatch": ["ds_config*.json"], "url": "./kfac.schema.json"}
]
```

[`python -m ds_kfac check`](command_line.md#check) tells you whether a config fits a model.

## Schedules

A key of type *schedule* takes a number, or an object that gives a value for each applied step since
the start of the run.

| schedule | value |
|---|---|
| `"linear"`, `"cosine"`, `"exponential"` | `start` until step `delay`, then a \
ramp to `end` over `steps` steps |
| `"piecewise"` | the first of `values` until the first of `steps`, then the second, and so on |

The default of `delay` is 0. `"exponential"` needs `start` and `end` above 0. Intervals are rounded
to whole steps. Here the update interval is 5 at first, 20 from step 100 on, and 50 from step 1000
on:

```json
"kfac": {
  "damping": {
    "value": {"schedule": "cosine", "start": 3, "end": 1, "steps": 200}
  },
  "factor": {
    "update_interval": {
      "schedule": "piecewise", "values": [5, 20, 50], "steps": [100, 1000]
    }
  }
}
```

## The "kfac" block

The column "why" says what a key is good for, and links to measurements.
"""
_TUNE = "[measured](../howto/tune.md#other-keys-of-kfacadamw)"
_OTHERS = "../howto/tune.md#k-fac-gradient-into-another-optimizer"
_IMAGES = "../howto/tune.md#convolutional-networks"
WHY = {
    "enabled": "lets you run without K-FAC from the same config",
    "report": "sets how much is printed",
    "adaptive": "saves work by SP-NGD's rule: with a tolerance of 0.3, ranks sent 21 % of the "
    "statistics ([measured](../explanation/scaling.md#measured))",
    "rescale_weights": "applies SP-NGD's rule for weights that are followed by a norm",
    "factor.update_interval": f"trades cost against loss ({_TUNE})",
    "factor.decay": "0 uses the last batch alone, as SP-NGD does",
    "factor.fisher": "activations_only saves memory; monte_carlo gives the true Fisher matrix",
    "factor.sampler": "must match your loss",
    "factor.prediction": "must match your model",
    "factor.weight_sharing": "must match your loss",
    "factor.loss_mean": "must match your loss",
    "factor.rows": "bounds traffic; use `all` if nodes see different data "
    "([measured](../explanation/scaling.md#batch-sums-come-from-a-few-ranks))",
    "factor.dense_max": "bounds cost, because memory grows with the square of a side, and time "
    "with its cube; cutting factors into blocks did not raise the loss visibly",
    "eigenbasis.refresh_interval": f"trades cost against loss ({_TUNE})",
    "burn_in.steps": f"trades cost against loss ({_TUNE})",
    "damping.value": f"the best value depends on the task: [CNNs]({_IMAGES}), [a GPT]({_OTHERS})",
    "damping.kind": "tikhonov is KAISA's kind, and was best on deep CNNs",
    "preconditioner.precision": "highest avoids TF32's error of 1.3 %",
    "preconditioner.method": "inverse is KAISA's method, and is cheaper for long sides",
    "preconditioner.eigenvalues": f"corrected is better [with AdamW]({_OTHERS})",
    "preconditioner.kl_clip": "a looser bound may train better: ResNet-8's loss was 0.03 with the "
    "bound 0.01, and 0.06 to 0.08 with the default",
    "adam.rotate": "false shows what curvature gains "
    "([measured](../howto/tune.md#what-curvature-is-worth))",
    "adam.except_layers": f"heads train worse if they are orthogonalized ({_TUNE}), and models "
    "name their heads differently",
    "adam.blocks": "describes fused weights whose names ds_kfac does not know",
    "adam.whiten": f"1/8 helps with large batches; 1/4 is worse on masked models ({_TUNE})",
    "layers.include": "selects layers",
    "layers.exclude": "selects layers",
    "layers.types": "selects layers; SP-NGD also preconditions norms",
    "assignment.gradient_worker_fraction": "trades memory against traffic, as in KAISA",
    "assignment.memory_budget_gb": "bounds memory",
    "communication.dtype": "bf16 halves the bytes that are sent",
    "offload.device": "saves device memory",
    "ops.backend": "lets you avoid a faulty kernel",
    "checkpoint.grams": "gives A to [other tools](../howto/factors_for_other_tools.md)",
    "checkpoint.on_missing": "lets you continue without K-FAC's part of a checkpoint",
}
"""dict from key name to the reason why the key exists. Either another value trains better than the
default by more than the spread between seeds, or the key has another purpose. A key without a
reason should be a constant in the code."""
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def manual(_: object = None) -> str:
    """Return the page: keys of the top level, then a section for each block."""
    schema = json_of(KFACConfig)
    # a key that refers to a definition is a block
    definitions = {
        name: key["$ref"].rpartition("/")[2]
        for name, key in schema["properties"].items()
        if "$ref" in key
    }
    top = {name: key for name, key in schema["properties"].items() if name not in definitions}
    parts = [HEAD, *table("", top), *details("", top)]
    for name, definition in definitions.items():
        block = schema["$defs"][definition]
        keys = block["properties"]
        parts += [f"\n### {name}\n", _text(block["description"]) + "\n"]
        parts += [*table(f"{name}.", keys), *details(f"{name}.", keys)]
    parts += [OPTIMIZER, _text(OptimizerParams.__doc__ or "") + "\n"]
    params = json_of(OptimizerParams)["properties"]
    return "\n".join([*parts, *table(f"{PARAMS}.", params), *details(f"{PARAMS}.", params)])


def json_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON schema, with all defaults."""
    return model.model_json_schema(schema_generator=_Schema)


def table(prefix: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table of keys, with the first paragraph of each docstring.

    Args:
        prefix: the text before each key's name, such as "factor.".
        keys: dict from key name to the key's JSON schema.
    """
    is_kfac = not prefix.startswith(PARAMS)  # parameters of KFACAdamW have no column "why"
    yield "| key | type | default | what it does |" + (" why |" if is_kfac else "")
    yield "|---|---|---|---|" + ("---|" if is_kfac else "")
    for name, key in keys.items():
        if "description" not in key:
            raise ValueError(f"{'kfac.' if is_kfac else ''}{prefix}{name} has no docstring")
        row = [
            f"`{prefix}{name}`",
            _type(key),
            f"`{json.dumps(key['default'])}`",
            _paragraphs(key)[0],
        ]
        if is_kfac:
            row.append(WHY.get(prefix + name, ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def details(prefix: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown list with an item for each key whose docstring has several
    paragraphs. The item has all of them except the first.

    Args:
        prefix: the text before each key's name, such as "factor.".
        keys: dict from key name to the key's JSON schema.
    """
    texts = {f"`{prefix}{name}`": _paragraphs(key)[1:] for name, key in keys.items()}
    lines = [
        f"- {name}: {' '.join(paragraphs)}" for name, paragraphs in texts.items() if paragraphs
    ]
    if lines:
        yield ""
        yield from lines


def _paragraphs(key: Mapping[str, Any]) -> list[str]:
    """Return a docstring's paragraphs, each on one line."""
    return [_text(paragraph) for paragraph in key["description"].split("\n\n")]


def _text(docstring: str) -> str:
    """Return a docstring on one line, in Markdown."""
    return " ".join(docstring.split()).replace("``", "`")


def _type(key: Mapping[str, Any]) -> str:
    """Return a key's type in words."""
    alternatives = [schema for schema in key.get("anyOf", ()) if schema.get("type") != "null"]
    if any("properties" in schema for schema in alternatives):
        return "schedule"
    if alternatives:
        return " or ".join(map(_type, alternatives))
    constants = key.get("enum", [key["const"]] if "const" in key else [])
    if constants:
        return ", ".join(f"`{json.dumps(constant)}`" for constant in constants)
    word = key["type"]
    if word == "array":
        word = f"list of {_type(key['items'])}"
    elif word == "boolean":
        word = "true, false"
    bounds = [f"{sign} {key[bound]}" for bound, sign in BOUNDS.items() if bound in key]
    return ", ".join([word, *bounds])


class _Schema(GenerateJsonSchema):
    """Generate JSON schemas whose defaults may be blocks or schedules."""

    def encode_default(self, default: Any) -> Any:
        if isinstance(default, BaseModel):
            return {}  # each key has its own default
        if not isinstance(default, Value):
            return super().encode_default(default)
        value = default.at(0)
        return int(value) if float(value).is_integer() else value


def schema(_: object = None) -> str:
    """Return the JSON schema of a DeepSpeed config. The schema describes only the ``"kfac"`` block
    and KFACAdamW's optimizer block."""
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
    """Return the schema of the optimizer block. It accepts any parameters of other optimizers."""
    left_out = {"enum": [None, AUTO]}
    params = {
        name: {
            "description": key["description"],
            "default": key["default"],
            "anyOf": [key, left_out],
        }
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
