"""The subject of an estimate: a model and a DeepSpeed config. No engine is built, and only the
shapes of the model are used."""

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_kfac.assignment.costs import CostModel
from ds_kfac.config.deepspeed_config import accumulation, block
from ds_kfac.config.keys import parse
from ds_kfac.config.values import AUTO, find_block, read_config
from ds_kfac.curvature.methods import METHODS
from ds_kfac.directions.kfac_adamw.user_optimizer import split_groups
from ds_kfac.directions.table import rule_in
from ds_kfac.engine.refusals import of_config, refused
from ds_kfac.model.layers import LayerSpec, parameter_shape
from ds_kfac.model.product_code import ADDED, COPIES, LINEAR, RIGHT, multiplied
from ds_kfac.model.scan import scan
from ds_kfac.model.shared import SharedInputs, agreed
from ds_kfac.plan.plan import EngineFacts, Observations, Plan, make_plan, sharing_candidates
from ds_kfac.zero.shards import ShardMap, held_by_layer, planned_shards

CONTEXT = 4096
"""Most tokens in the example of a language model. The model's own config may allow a million."""
DTYPES = ("fp16", "bf16")
"""Blocks of a DeepSpeed config that choose the dtype of parameters. Without either, the dtype is
fp32."""
CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
"""Types of modules whose tensors have channels as their second dimension. Other modules have
features as their last dimension."""


def config_of(
    source: Mapping[str, Any] | str | os.PathLike,
    optimizer: str | None = None,
    dtype: str | None = None,
) -> Mapping[str, Any]:
    """Return a DeepSpeed config, see :func:`read_config`.

    Args:
        optimizer: type of the optimizer, if the script passes it instead of the config.
        dtype: "fp32", "bf16" or "fp16", if a framework fills it in.

    Raises:
        ValueError: the config is wrong; it has an optimizer or a dtype and the argument contradicts
            it; or its optimizer is unknown.
    """
    config = read_config(source)
    name = (
        block(config, "optimizer").get("type") if rule_in(config).optimizer_type is None else None
    )
    if name is not None and not (
        str(name).lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, str(name))
    ):
        raise ValueError(
            f"optimizer.type: got {name!r}, which is in neither DeepSpeed, torch.optim nor ds_kfac"
        )
    if optimizer is not None and config.get("optimizer") is not None:
        raise ValueError(f"--optimizer {optimizer}: the config has one; leave either out")
    if dtype is not None:
        if other := [
            name for name in DTYPES if name != dtype and block(config, name).get("enabled") is True
        ]:
            raise ValueError(f"--dtype {dtype}: the config has {other[0]}; leave either out")
        config = {**config, **{name: {"enabled": name == dtype} for name in DTYPES}}
    return config if optimizer is None else {**config, "optimizer": {"type": optimizer}}


class Trace(TorchFunctionMode):
    """What one forward pass without gradients shows about layers. A trace without a model is empty.

    A trace reads only shapes. Shapes do not show which rows go to which matrix of a stack.

    Args:
        example: positional arguments of the model's forward, on the model's device. If the first
            tensor has integers, each of its elements is a unit (a token). Otherwise each entry of
            its first dimension is a unit (an image).

    Attributes:
        inputs: module name -> numbers that identify the module's inputs. Modules with equal numbers
            share their inputs.
        rows: module name -> number of rows per unit. A module that is missing has 1.
        stacked: name of a parameter that is a stack of matrices, such as experts -> number of rows
            per unit that one matrix multiplies, averaged over the matrices.
        units: number of units in the example.

    Raises ValueError if the model does not run.
    """

    def __init__(self, model: nn.Module | None = None, example: Sequence[Any] = ()) -> None:
        super().__init__()
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.rows: dict[str, float] = {}
        self.stacked: dict[str, float] = {}
        self.units = 0
        # id of a parameter -> name, number of matrices, outputs of each matrix
        self._stacks: dict[int, tuple[str, int, int]] = {}
        # id of a copy -> the copy itself, to keep it alive, and the id of its stack
        self._copies: dict[int, tuple[Tensor, int]] = {}
        if model is not None:
            self._run(model, example)

    def rows_of(self, layer: LayerSpec) -> float:
        """Return the number of rows per unit of a layer, or 1 if the trace has not seen the
        layer."""
        return self.stacked.get(layer.weight, self.rows.get(layer.module, 1.0))

    def _run(self, model: nn.Module, example: Sequence[Any]) -> None:
        first = next((x for x in example if isinstance(x, Tensor) and x.ndim), None)
        if first is None:
            raise ValueError("the example inputs have no tensor of at least one dimension")
        self.units = len(first) if first.is_floating_point() else first.numel()
        modules = {
            name: module
            for name, module in model.named_modules()
            if list(module.parameters(recurse=False))
        }
        for name, module in modules.items():
            for parameter, layout in multiplied(module).items():
                weight = module._parameters[parameter]
                shape = layout.shape(parameter_shape(weight))
                if len(shape) == 3:
                    outputs = shape[-1] if layout.transposed else shape[-2]
                    self._stacks[id(weight)] = f"{name}.{parameter}".lstrip("."), shape[0], outputs
        shared = SharedInputs(modules)
        handles = []

        def called(
            name: str, module: nn.Module, inputs: tuple, named: Mapping[str, Any], output: Any
        ) -> None:
            x = inputs[0] if inputs else next(iter(named.values()), None)
            if isinstance(x, Tensor):
                self.inputs[name] = (*self.inputs.get(name, ()), shared.number(name, x))
            # a transposed convolution has one row for each pixel of its input
            of_rows = x if isinstance(module, nn.modules.conv._ConvTransposeNd) else output
            if isinstance(of_rows, Tensor) and of_rows.ndim:
                rows = (
                    of_rows.numel()
                    // of_rows.shape[1 if isinstance(module, CHANNELS_FIRST) else -1]
                )
                self.rows[name] = self.rows.get(name, 0.0) + rows / self.units

        try:
            for name, module in modules.items():
                handles.append(
                    module.register_forward_hook(partial(called, name), with_kwargs=True)
                )
            with torch.no_grad(), self:
                model(*example)
        except Exception as problem:
            raise ValueError(
                f"{type(model).__name__} does not run on its example inputs "
                f"({type(problem).__name__}: {problem}); give others, or none: without them no "
                "layers are assumed to share their inputs"
            ) from problem
        finally:
            for handle in handles:
                handle.remove()
        self._copies.clear()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if isinstance(output, Tensor) and name in COPIES | {"__getitem__", "index_select"}:
            source = self._source(args[0])
            if source is not None and output._base is None:
                self._copies[id(output)] = output, source
        elif isinstance(output, Tensor) and name in LINEAR | RIGHT | ADDED | {"__matmul__"}:
            operands = (*args, *(kwargs or {}).values())
            source = next((stack for x in operands if (stack := self._source(x)) is not None), None)
            if source is not None:
                parameter, count, outputs = self._stacks[source]
                rows = output.numel() / outputs / count
                self.stacked[parameter] = self.stacked.get(parameter, 0.0) + rows / self.units
        return output

    def _source(self, x: Any) -> int | None:
        """Return the id of the stack that x is, is a view of, or was copied from. Return None if
        there is no such stack."""
        if not isinstance(x, Tensor):
            return None
        base = x if x._base is None else x._base
        return id(base) if id(base) in self._stacks else self._copies.get(id(base), (None, None))[1]


class Subject:
    """A model, possibly on the meta device, and a DeepSpeed config.

    Args:
        ds_config: the DeepSpeed config. Without a "kfac" block, the defaults are used.
        stage: ZeRO stage that replaces the one in the config; None: the config's stage.

    Attributes:
        user_config: the "kfac" block as it was written.
        config, answers: the block with its nulls resolved, and how they were resolved, in words.
        rule: the optimizer's update rule.
        context: what DeepSpeed would build.
        replicated: whether every rank has every averaged gradient.
        gradients: dtype of gradients where K-FAC reads them.
        scan, layers: the result of scanning the model, and its layers, with large ones divided.
        groups: parameter groups of the optimizer, in its order. A group is a list of (name, number
            of elements) of its trained parameters.
        shared: groups of layers that have the same input.
        forward: number of multiplications per unit (token or image) in the forward pass. It is 0 if
            the number is unknown for a stack.

    Raises ValueError if the config is wrong, if the model has no layers, or if K-FAC or the
    estimator does not support the engine.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_config: Mapping[str, Any],
        stage: int | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.ds_config = ds_config
        self.trace = trace or Trace()
        self.rule = rule_in(ds_config)
        written = find_block(ds_config)
        optimizer = str(block(ds_config, "optimizer").get("type") or "")
        self.user_config = parse({} if written is None else written)
        self.config, self.answers = self.rule.resolved(self.user_config, optimizer)
        context = self.context = of_config(ds_config, self.config, self.rule.optimizer_type, stage)
        problems = refused(context)
        if block(ds_config, "tensor_parallel").get("autotp_size", 0) not in (0, 1):
            problems.append(
                "tensor_parallel.autotp_size: the estimator knows data parallelism only: take it "
                "out, and give the data-parallel ranks as the world"
            )
        if problems:
            raise ValueError("; ".join(problems))
        offloaded = context.offload_device not in ("none", None)
        self.replicated = context.stage == 0
        self.gradients = context.parameters
        if context.stage > 0:
            self.gradients = (
                torch.float32 if offloaded else accumulation(ds_config) or context.parameters
            )
        scanned = scan(model, self.rule.scanned(self.config))
        self.layers = self.rule.cut(self.config, scanned.layers)
        self.model = model
        self.scan = replace(scanned, layers=self.layers)
        groups = [list(model.parameters())]
        if self.rule.optimizer_type is not None:
            groups = [group["params"] for group in split_groups(model, self.scan, None)]
        name_of = {
            id(parameter): name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.groups = [
            [(name_of[id(p)], prod(parameter_shape(p))) for p in group if id(p) in name_of]
            for group in groups
        ]
        inputs = {layer.name: self.trace.inputs.get(layer.module, ()) for layer in self.layers}
        self.shared = agreed(
            [inputs], sharing_candidates(self.layers, METHODS[self.config.preconditioner.method])
        )
        stacks = {layer.weight for layer in self.layers if layer.part[1] > 1 and layer.product}
        self.forward = _forward(model, self.trace) if stacks <= self.trace.stacked.keys() else 0.0

    def __str__(self) -> str:
        name = str(self.context.parameters).removeprefix("torch.")
        return (
            f"ZeRO stage {self.context.stage}, {name} parameters{self.assumed}, "
            f"{self.context.optimizer}"
        )

    @property
    def assumed(self) -> str:
        """Words that follow the dtype of parameters in a text if the dtype is only assumed, because
        the config has "auto" in its place."""
        unknown = [
            f'"{key}"' for key in DTYPES if block(self.ds_config, key).get("enabled") == AUTO
        ]
        if not unknown or self.context.parameters is not torch.float32:
            return ""
        return (
            f' (assumed: {" and ".join(unknown)} {"are" if unknown[1:] else "is"} "auto", --dtype '
            "says which)"
        )

    def strategy(self, workers: int, world: int) -> str:
        """Return the name of a strategy, as in KAISA. ZeRO's owner scheme corresponds to KAISA's
        MEM-OPT.

        Args:
            workers: number of ranks that step a layer.
        """
        if not self.replicated:
            return f"ZeRO-{self.context.stage} owners"
        if world == 1:
            return "one rank"
        return {1: "MEM-OPT", world: "COMM-OPT"}.get(workers, f"HYBRID-OPT {workers}/{world}")

    def shards(self, world: int) -> ShardMap:
        """Return where DeepSpeed will put the layers' gradients."""
        dealt = bool(block(self.ds_config, "zero_optimization").get("round_robin_gradients"))
        return planned_shards(
            self.layers, self.groups, world=world, stage=self.context.stage, round_robin=dealt
        )

    def plan(self, shards: ShardMap, costs: CostModel, rows: int | None = None) -> Plan:
        """Return the plan that a run has after its first step, when it is known which layers share
        inputs. Raise ValueError like :func:`make_plan`.

        Args:
            rows: number of tokens (or images) of a rank in a step; None: unknown.
        """
        facts = EngineFacts(
            world=shards.world,
            held=None if self.replicated else held_by_layer(self.layers, shards),
            parameters=self.context.parameters,
            gradients=self.gradients,
            moments=self.rule.moments_count(self.config),
            rotates=self.rule.rotates(self.config),
        )
        plan = make_plan(self.layers, facts, self.config, costs)
        rows_of_layers = None
        if rows is not None:
            rows_of_layers = {layer.name: rows * self.trace.rows_of(layer) for layer in self.layers}
        shared = self.shared if plan.config.choice.shares else ()
        return plan.with_observations(Observations(shared, rows_of_layers))


def _forward(model: nn.Module, trace: Trace) -> float:
    """Return the number of multiplications per unit in the forward pass: parameter elements times
    rows per unit. The look-up of an embedding costs nothing. A head that shares the embedding's
    weight is counted."""
    total = 0.0
    counted = set[int]()
    for name, module in model.named_modules():
        parameters = (
            {}
            if isinstance(module, nn.Embedding)
            else dict(module.named_parameters(name, recurse=False))
        )
        rows = next(
            (trace.stacked[each] for each in parameters if each in trace.stacked),
            trace.rows.get(name, 1),
        )
        new = {
            each: parameter
            for each, parameter in parameters.items()
            if id(parameter) not in counted
        }
        counted |= set(map(id, new.values()))
        total += sum(
            prod(parameter_shape(p)) * trace.stacked.get(each, rows) for each, p in new.items()
        )
    return total


def build(name: str, lora: int | None = None) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Return a model on the meta device and example arguments of its forward. The arguments are
    None if they are unknown.

    Args:
        name: one of three forms:
            "module:factory" names a function that returns a model, or (model, example arguments).
            "timm:NAME" names a model of timm. The example is an image of the size on which the
            model was trained.
            "hf:PATH" is the path of a config.json of transformers, or of its folder.
        lora: rank of the adapters that peft adds to all linear layers except the head, while
            everything else is frozen; None: no adapters.

    Raises:
        ValueError: there is no such model.
    """
    library, _, attribute = name.partition(":")
    if not library or not attribute:
        raise ValueError(
            f"model {name}: give module:factory, a function that returns a model, such as "
            "my_models:gpt; or hf:PATH, a config.json of transformers"
        )
    try:
        module = importlib.import_module("transformers" if library == "hf" else library)
        peft = None if lora is None else importlib.import_module("peft")
    except ImportError as problem:
        raise ValueError(
            f"model {name}: {problem}; is it installed, or is its folder in PYTHONPATH?"
        ) from problem
    with torch.device("meta"):
        made: Any
        if library == "hf":
            made = _of_transformers(module, attribute)
        elif library == "timm":
            made = module.create_model(attribute)
            made = made, torch.zeros(1, *made.default_cfg["input_size"])
        elif callable(factory := getattr(module, attribute, None)):
            made = factory()
        else:
            raise ValueError(f"model {name}: {library} has no function {attribute}")
        model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model {name}: returned a {type(model).__name__}, not a torch.nn.Module"
            )
        if peft is not None:
            options = (
                {"task_type": "CAUSAL_LM"}
                if hasattr(model, "prepare_inputs_for_generation")
                else {}
            )
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=lora, target_modules="all-linear", **options)
            )
    if example is None:
        return model, None
    arguments = example if isinstance(example, (tuple, list)) else (example,)
    return model, tuple(x.to("meta") if isinstance(x, Tensor) else x for x in arguments)


def _of_transformers(transformers: Any, path: str) -> Any:
    """Return a model, or (model, example arguments). The model's class is the one that its config
    names, otherwise a causal language model."""
    if not os.path.exists(path):
        raise ValueError(
            f"model hf:{path}: no such file or folder; give a model's config.json, nothing is "
            "downloaded"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as problem:
        raise ValueError(f"model hf:{path}: {str(problem).splitlines()[0]}") from problem
    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    model_class = next((each for each in classes if each is not None), None)
    if model_class:
        made = model_class._from_config(config)
    else:
        made = transformers.AutoModelForCausalLM.from_config(config)
    if made._can_set_experts_implementation():
        # the other implementations read values, and tensors on the meta device have none
        made.set_experts_implementation("batched_mm")
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        return made, torch.zeros(1, config.num_channels, config.image_size, config.image_size)
    if config.is_encoder_decoder or not hasattr(config, "vocab_size"):
        return made
    length = min(getattr(config, "max_position_embeddings", CONTEXT) or CONTEXT, CONTEXT)
    return made, torch.zeros(1, length, dtype=torch.long)
