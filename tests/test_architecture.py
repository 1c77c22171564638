"""The house rules that a machine can check: imports go down, no circles, small files."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "ds_kfac"
# Lowest first; inside a floor, a file may import the files before it.
FLOORS = [
    [
        "reference", "ops.reference", "ops.functional_adam", "ops.functional", "ops.guarded", "ops.gpus",
        "ops.build", "ops.cuda_compile", "ops.builders", "ops.cpp_library", "ops.cpp",
        "ops.cuda_library", "ops.cuda", "ops.triton.base", "ops.triton.availability",
        "ops.triton.elementwise", "ops.triton.eigen_scale", "ops.triton.corrected_scale",
        "ops.triton.adam_scale", "ops.triton.triangle", "ops.triton.bias_row",
        "ops.triton.syrk_configs", "ops.triton.syrk_descriptor", "ops.triton.syrk",
        "ops.triton.patch_syrk", "ops.triton.backend", "ops.backends", "ops.dispatch",
    ],
    [
        "side", "factor", "adaptive", "precision", "warm_start", "eigen_rounds", "eigensolver", "eigenbasis",
        "rotation", "moments", "damping", "inverse", "orthogonal", "preconditioner", "host_copy",
    ],
    [
        "layers.base", "layers.linear", "layers.conv1d", "layers.embedding", "layers.norm",
        "layers.tensor_parallel", "layers.registry", "layers.row_blocks", "scan",
        "factor_spec", "hooks", "batch_info", "experts", "row_masks", "loss_terms", "calls", "own_backward", "rows",
        "row_sums", "shared_inputs", "capture", "sampling", "schedule", "timetable", "refresher", "layer_state",
        "stacking", "factor_state",
    ],
    [
        "costs", "measured_costs", "grid", "work", "workers", "decomposers", "assignment", "baselines", "stagger",
        "agreement", "grouping", "bucket", "traffic", "wire", "reducer", "zero.shards", "zero.regions",
        "zero.relayout", "mail", "board", "delivery", "zero.domains", "zero.layout", "zero.replicated",
        "zero.bf16_optimizer", "zero.stage_1_and_2", "zero.stage3", "zero.shard_plan", "zero.registry",
        "zero.exchange", "zero.validate", "zero.selftest", "zero.extra_backward", "adamw",
    ],
    [
        "columns", "config_values", "config_errors", "config_blocks", "config_system", "config", "metrics", "planning",
        "notices", "strategy", "agenda", "decomposition", "curvature", "sharing", "target", "direction", "adam_choice",
        "adam_direction", "watch", "adam_groups", "parallelism", "optimizer", "job", "pipeline", "loss_sampling",
        "checkpoint_names", "checkpoint_disk", "checkpoint_header", "checkpoint_checks", "checkpoint_files",
        "checkpoint_match", "checkpoint_parts", "checkpoint", "checkpointing", "report", "environment",
    ],
    [
        "estimate.transformers", "estimate.resnet", "estimate.models", "estimate.trace", "estimate.mode",
        "estimate.subject", "estimate.period", "estimate.traffic", "estimate.memory", "estimate.machine",
        "estimate.seconds", "estimate.estimates", "estimate.tables", "estimate.mem_needs", "estimate.command",
    ],
    ["assembly", "accounting", "attachment", "optimizer_block", "engine", "", "__main__"],
]  # fmt: skip
ORDER = {name: index for index, name in enumerate(name for floor in FLOORS for name in floor)}
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Full names of the modules a file imports; ``from package import module`` counts as the module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_every_module_has_a_floor():
    packages = {"ops", "ops.triton", "layers", "zero", "estimate"}
    assert set(modules()) - packages == set(ORDER)


def test_imports_go_down():
    for name, path in modules().items():
        for target in imports(path):
            inner = target.removeprefix("ds_kfac.")
            if target.startswith("ds_kfac.") and inner in ORDER:
                assert ORDER[inner] < ORDER[name], f"{name} imports {inner}, which is above it"


def test_floors_0_to_2_know_neither_deepspeed_nor_communication():
    for name, path in modules().items():
        if name in FLOOR and FLOOR[name] <= 2:
            outside = [t for t in imports(path) if t.split(".")[0] == "deepspeed" or t.startswith("torch.distributed")]
            assert not outside, f"{name} imports {outside}"


def test_files_hold_one_concept():
    for name, path in modules().items():
        lines = len(path.read_text().splitlines())
        assert lines <= 300, f"{name} has {lines} lines: which concept moved in?"


def test_reference_stands_alone():
    assert {target.split(".")[0] for target in imports(PACKAGE / "reference.py")} == {"torch", "typing"}
