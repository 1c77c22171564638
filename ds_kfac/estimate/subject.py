"""What an estimate is of: a model and a DeepSpeed config. No engine is built, and of the model shapes alone count."""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import hjson
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_kfac.assignment.costs import CostModel
from ds_kfac.config.keys import parse
from ds_kfac.config.values import AUTO, find_block
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.kfac_adamw.user_optimizer import split_groups
from ds_kfac.directions.table import rule_in
from ds_kfac.engine.refusals import accumulation, block, of_config, refused
from ds_kfac.model.calls import SharedInputs, agreed
from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.product_code import ADDED, COPIES, LINEAR, RIGHT, multiplied
from ds_kfac.model.scan import scan
from ds_kfac.plan.plan import EngineFacts, Observations, Plan, make_plan, sharing_candidates
from ds_kfac.zero.shards import ShardMap, held_by_layer, planned_shards

CONTEXT = 4096
"""Most tokens of an example of a language model; its config may allow a million."""
DTYPES = ("fp16", "bf16")
"""Blocks of a DeepSpeed config that choose the dtype of parameters; without, it is fp32."""
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
"""Modules whose tensors' second dimension is what others have last."""


def read_config(
    source: Mapping[str, Any] | str | os.PathLike, optimizer: str | None = None, dtype: str | None = None
) -> Mapping[str, Any]:
    """A DeepSpeed config, with the optimizer that the script passes, and the dtype ("fp32", "bf16", "fp16") that a
    framework fills in; ValueError if it names another itself, or is none."""
    try:
        found = source if isinstance(source, Mapping) else hjson.loads(Path(source).read_text())
    except (OSError, ValueError) as problem:
        raise ValueError(f"{source}: not JSON ({problem}); name a DeepSpeed config file") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{source}: not a JSON object; name a DeepSpeed config file")
    if optimizer is not None and found.get("optimizer") is not None:
        raise ValueError(f"--optimizer {optimizer}: the config has one; leave either out")
    if dtype is not None:
        if other := [name for name in DTYPES if name != dtype and block(found, name).get("enabled") is True]:
            raise ValueError(f"--dtype {dtype}: the config has {other[0]}; leave either out")
        found = {**found, **{name: {"enabled": name == dtype} for name in DTYPES}}
    return found if optimizer is None else {**found, "optimizer": {"type": optimizer}}


class Trace(TorchFunctionMode):
    """What a forward shows, run once without gradients; an empty one knows nothing. It reads shapes alone: which matrix
    of a stack takes a row is not known on the meta device.

    Args:
        example: positional arguments of the model's forward, on its device. Units are all elements of its first tensor
            if they are integers, else those of the first dimension.

    Attributes:
        inputs: module name -> numbers of its inputs; modules with equal ones share them.
        rows: module name -> rows of one unit (token, or image); 1 for those that are not in it.
        stacked: name of a parameter that is a stack of matrices, such as experts -> rows of one unit that each of them
            multiplies, in the mean of them.
        units: in the example.

    Raises ValueError if the model does not run.
    """

    def __init__(self, model: nn.Module | None = None, example: Sequence[Any] = ()) -> None:
        super().__init__()
        self.inputs: Mapping[str, tuple[int, ...]] = {}
        self.rows, self.stacked, self.units = dict[str, float](), dict[str, float](), 0
        self._sides: dict[int, tuple[str, int, int]] = {}  # id of a parameter -> name, matrices, outputs of one
        self._copies: dict[int, tuple[Tensor, int]] = {}  # and of what: ids are of living tensors
        if model is not None:
            self._run(model, example)

    def rows_of(self, layer: LayerSpec) -> float:
        """Rows of one unit that a layer has; if not known, as if each took part."""
        return self.stacked.get(layer.weight, self.rows.get(layer.module, 1.0))

    def _run(self, model: nn.Module, example: Sequence[Any]) -> None:
        first = next((x for x in example if isinstance(x, Tensor) and x.ndim), None)
        if first is None:
            raise ValueError("the example inputs have no tensor of at least one dimension")
        self.units = len(first) if first.is_floating_point() else first.numel()
        modules = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
        for name, module in modules.items():
            for parameter, layout in multiplied(module).items():
                weight = module._parameters[parameter]
                shape = layout.shape(parameter_shape(weight))
                if len(shape) == 3:
                    outputs = shape[-1] if layout.transposed else shape[-2]
                    self._sides[id(weight)] = f"{name}.{parameter}".lstrip("."), shape[0], outputs
        seen, handles = SharedInputs(modules), []

        def called(name: str, module: nn.Module, inputs: tuple, named: Mapping[str, Any], output: Any) -> None:
            x = inputs[0] if inputs else next(iter(named.values()), None)
            if isinstance(x, Tensor):
                seen.see(name, x)
            seen_by = x if isinstance(module, nn.modules.conv._ConvTransposeNd) else output
            if isinstance(seen_by, Tensor) and seen_by.ndim:
                rows = seen_by.numel() // seen_by.shape[1 if isinstance(module, CHANNELS_FIRST) else -1]
                self.rows[name] = self.rows.get(name, 0.0) + rows / self.units

        try:
            for name, module in modules.items():
                handles.append(module.register_forward_hook(partial(called, name), with_kwargs=True))
            with torch.no_grad(), self:
                model(*example)
        except Exception as problem:
            raise ValueError(
                f"{type(model).__name__} does not run on its example inputs ({type(problem).__name__}: {problem}); "
                "give others, or none: then no layers are assumed to share theirs"
            ) from problem
        finally:
            for handle in handles:
                handle.remove()
        self.inputs = seen.found
        self._copies.clear()

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if isinstance(output, Tensor) and name in COPIES | {"__getitem__", "index_select"}:
            source = self._source(args[0])
            if source is not None and output._base is None:
                self._copies[id(output)] = output, source
        elif isinstance(output, Tensor) and name in LINEAR | RIGHT | ADDED | {"__matmul__"}:
            operands = (*args, *(kwargs or {}).values())
            source = next((found for x in operands if (found := self._source(x)) is not None), None)
            if source is not None:
                parameter, count, outputs = self._sides[source]
                rows = output.numel() / outputs / count
                self.stacked[parameter] = self.stacked.get(parameter, 0.0) + rows / self.units
        return output

    def _source(self, x: Any) -> int | None:
        """The stack that a tensor is, is a view of, or was copied from."""
        if not isinstance(x, Tensor):
            return None
        base = x if x._base is None else x._base
        return id(base) if id(base) in self._sides else self._copies.get(id(base), (None, None))[1]


class Subject:
    """A model, perhaps on the meta device, and a config, of which the defaults count where it has no "kfac" block, and
    another stage of ZeRO if that is given.

    Attributes:
        given, config, answers: the "kfac" block, with its nulls answered, and how.
        rule: how the optimizer steps.
        context: what DeepSpeed would build.
        replicated: whether every rank has every averaged gradient.
        gradients: dtype of gradients where K-FAC reads them.
        in_place: whether results take the places of gradients, see :class:`ds_kfac.zero.layout.ShardLayout`.
        scan, layers: what was found in the model.
        groups: parameter groups of the optimizer: names and sizes of trained parameters, in its order.
        shared: groups of layers that see one input.
        forward: multiplications of one token (or image) in the forward; 0 if a stack's share of them is not known.

    Raises ValueError for a wrong config, an engine that K-FAC or the estimator does not know, a model without layers.
    """

    def __init__(
        self, model: nn.Module, ds_config: Mapping[str, Any], stage: int | None = None, trace: Trace | None = None
    ) -> None:
        self.ds_config, self.trace, self.rule = ds_config, trace or Trace(), rule_in(ds_config)
        found = find_block(ds_config)
        self.given = parse({} if found is None else found)
        self.config, self.answers = self.rule.resolved(self.given, str(block(ds_config, "optimizer").get("type") or ""))
        context = self.context = of_config(ds_config, self.config, self.rule.optimizer_type, stage)
        problems = refused(context)
        if block(ds_config, "tensor_parallel").get("autotp_size", 0) not in (0, 1):
            problems.append(
                "tensor_parallel.autotp_size: the estimator knows data parallelism only: take it out, and give the "
                "data-parallel ranks as the world"
            )
        if problems:
            raise ValueError("; ".join(problems))
        offloaded = context.offload_device not in ("none", None)
        self.replicated = context.stage == 0 or context.bf16_optimizer
        self.gradients = context.parameters
        if context.stage > 0:
            self.gradients = torch.float32 if offloaded else accumulation(ds_config) or context.parameters
        self.in_place = not self.replicated and not offloaded and self.gradients is not torch.float16
        seen = scan(model, self.rule.scanned(self.config))
        self.layers = self.rule.cut(self.config, seen.layers)
        self.model, self.scan = model, replace(seen, layers=self.layers)
        groups = [list(model.parameters())]
        if self.rule.optimizer_type is not None:
            groups = [group["params"] for group in split_groups(model, self.scan, None, apart="apart")]
        name_of = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.groups = [
            [(name_of[id(p)], prod(parameter_shape(p))) for p in group if id(p) in name_of] for group in groups
        ]
        inputs = {layer.name: self.trace.inputs.get(layer.module, ()) for layer in self.layers}
        self.shared = agreed([inputs], sharing_candidates(self.layers, METHODS[self.config.preconditioner.method]))
        stacks = {layer.weight for layer in self.layers if layer.part[1] > 1 and layer.product}
        self.forward = _forward(model, self.trace) if stacks <= self.trace.stacked.keys() else 0.0

    def __str__(self) -> str:
        name = str(self.context.parameters).removeprefix("torch.")
        return f"ZeRO stage {self.context.stage}, {name} parameters{self.assumed}, {self.context.optimizer}"

    @property
    def assumed(self) -> str:
        """Of the dtype of parameters, in words: frameworks fill in what is "auto"."""
        unknown = [f'"{key}"' for key in DTYPES if block(self.ds_config, key).get("enabled") == AUTO]
        if not unknown or self.context.parameters is not torch.float32:
            return ""
        return f' (assumed: {" and ".join(unknown)} {"are" if unknown[1:] else "is"} "auto", --dtype says which)'

    def strategy(self, workers: int, world: int) -> str:
        """KAISA's names; ZeRO's owners are its MEM-OPT."""
        if not self.replicated:
            return f"ZeRO-{self.context.stage} owners"
        if world == 1:
            return "one rank"
        return {1: "MEM-OPT", world: "COMM-OPT"}.get(workers, f"HYBRID-OPT {workers}/{world}")

    def shards(self, world: int) -> ShardMap:
        """Where DeepSpeed will put the layers' gradients."""
        dealt = bool(block(self.ds_config, "zero_optimization").get("round_robin_gradients"))
        stage = 0 if self.replicated else self.context.stage
        return planned_shards(self.layers, self.groups, world=world, stage=stage, round_robin=dealt)

    def plan(self, shards: ShardMap, costs: CostModel, rows: int | None = None) -> Plan:
        """The plan that a run would make, once it knows the layers that share their inputs, and the tokens (or images)
        of a rank in a step. Raises ValueError as :func:`make_plan`."""
        facts = EngineFacts(
            world=shards.world,
            held=None if self.replicated else held_by_layer(self.layers, shards),
            parameters=self.context.parameters,
            gradients=self.gradients,
            moments=self.rule.moments_count(self.config),
            scheduled=block(self.ds_config, "scheduler").get("type") is not None,
            rotates=self.rule.rotates(self.config),
        )
        plan = make_plan(self.layers, facts, self.config, costs)
        seen = None if rows is None else {layer.name: rows * self.trace.rows_of(layer) for layer in self.layers}
        return plan.with_observations(Observations(self.shared if plan.shares else (), seen))


def _forward(model: nn.Module, trace: Trace) -> float:
    """One per parameter and row; a look-up costs nothing, but a head with an embedding's weight does. Of a stack's
    matrices those that a row takes."""
    total, seen = 0.0, set[int]()
    for name, module in model.named_modules():
        own = {} if isinstance(module, nn.Embedding) else dict(module.named_parameters(name, recurse=False))
        rows = next((trace.stacked[each] for each in own if each in trace.stacked), trace.rows.get(name, 1))
        new = {each: parameter for each, parameter in own.items() if id(parameter) not in seen}
        seen |= set(map(id, new.values()))
        total += sum(prod(parameter_shape(p)) * trace.stacked.get(each, rows) for each, p in new.items())
    return total


def build(name: str, lora: int | None = None, device: str = "meta") -> tuple[nn.Module, tuple[Any, ...] | None]:
    """A model on a device, and the arguments of its forward for one example, or None if they are not known.

    Args:
        name: "module:factory", a function that returns a model, or a model and a tuple of arguments (or the only one);
            "timm:NAME", with an image of the size it was trained on; or "hf:PATH", a config.json of transformers or its
            folder. ValueError if there is no such model.
        lora: rank of adapters that peft puts to all linear layers but the head, all else frozen; None: none.
    """
    where, _, attribute = name.partition(":")
    if not where or not attribute:
        raise ValueError(
            f"model {name}: give module:factory, a function that returns a model, such as my_models:gpt; or hf:PATH, a "
            "config.json of transformers"
        )
    try:
        module = importlib.import_module("transformers" if where == "hf" else where)
        peft = None if lora is None else importlib.import_module("peft")
    except ImportError as problem:
        raise ValueError(f"model {name}: {problem}; is it installed, or is its folder in PYTHONPATH?") from problem
    with torch.device(device):
        made: Any
        if where == "hf":
            made = _of_transformers(module, attribute)
        elif where == "timm":
            made = module.create_model(attribute)
            made = made, torch.zeros(1, *made.default_cfg["input_size"])
        elif callable(factory := getattr(module, attribute, None)):
            made = factory()
        else:
            raise ValueError(f"model {name}: {where} has no function {attribute}")
        model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(f"model {name}: returned a {type(model).__name__}, not a torch.nn.Module")
        if peft is not None:
            options = {"task_type": "CAUSAL_LM"} if hasattr(model, "prepare_inputs_for_generation") else {}
            model = peft.get_peft_model(model, peft.LoraConfig(r=lora, target_modules="all-linear", **options))
    if example is None:
        return model, None
    arguments = example if isinstance(example, (tuple, list)) else (example,)
    return model, tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)


def _of_transformers(transformers: Any, path: str) -> Any:
    """By the class that its config names, else as a causal language model."""
    if not os.path.exists(path):
        raise ValueError(f"model hf:{path}: no such file or folder; give a model's config.json, nothing is downloaded")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as problem:
        raise ValueError(f"model hf:{path}: {str(problem).splitlines()[0]}") from problem
    known = [getattr(transformers, name, None) for name in config.architectures or ()]
    kind = next((found for found in known if found is not None), None)
    made = kind._from_config(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
    if made.device.type == "meta" and made._can_set_experts_implementation():  # the one of their forms that runs there
        made.set_experts_implementation("batched_mm")
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        return made, torch.zeros(1, config.num_channels, config.image_size, config.image_size)
    if config.is_encoder_decoder or not hasattr(config, "vocab_size"):
        return made
    length = min(getattr(config, "max_position_embeddings", CONTEXT) or CONTEXT, CONTEXT)
    return made, torch.zeros(1, length, dtype=torch.long)
