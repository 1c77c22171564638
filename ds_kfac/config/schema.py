"""The ``"kfac"`` block as a JSON schema, for editors."""

import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from ds_kfac.config.kfac import KEY, KFACConfig
from ds_kfac.schedule.intervals import Value


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
