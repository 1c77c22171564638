"""Every promise of docs/reference/supported.md has a test.

A promise is a row of a table, a bullet, or a sentence that says what is supported, equal or
refused. The table names it by its first words, under the heading of its section.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/reference/supported.md"

MODES = "deepspeed/test_modes.py::test_engine_mode_matches_reference"
ADAM_MODES = "deepspeed/test_modes.py::test_kfac_adamw_matches_reference"
AUTOCAST = "deepspeed/test_modes.py::test_autocast_matches_reference"
FEATURES = "deepspeed/test_features.py::test_every_feature_matches_reference"
STYLES = "deepspeed/test_traps.py::test_every_way_to_run_a_model_trains_like_the_reference"
FROZEN = "deepspeed/test_unused.py::test_a_frozen_parameter_is_not_moved_whenever_it_was_frozen"
REFUSED = "deepspeed/test_seam.py::test_refusals_say_what_to_change"
COMBINATIONS = "zero/test_refusals.py::test_a_combination_is_refused_with_a_remedy"
VERSIONS = "zero/test_deepspeed_versions.py::"
VERSION_TABLE = (
    f"{VERSIONS}test_the_table_of_versions_has_a_row_a_tested_version_and_a_cell_a_column"
)
MODEL_PARALLEL = "deepspeed/test_model_parallel.py::test_model_parallelism_matches_one_process"
TOGETHER = (
    "deepspeed/test_model_parallel.py"
    "::test_with_everything_on_what_several_ranks_have_is_the_same_bits"
)
PARALLEL_REFUSED = (
    "deepspeed/test_model_parallel.py"
    "::test_what_model_parallelism_cannot_do_is_refused_on_every_rank"
)
SAVED_ONCE = "deepspeed/test_model_parallel.py::test_a_checkpoint_holds_every_layer_of_the_job_once"
SHARD_SIZE = (
    "deepspeed/test_tensor_parallel.py::test_a_shard_takes_steps_of_the_size_of_a_whole_layers"
)
MADE_BEFORE = (
    "deepspeed/test_model_parallel.py"
    "::test_an_optimizer_made_before_the_layers_were_replaced_is_refused"
)
ESTIMATED = "deepspeed/test_estimate.py::test_bytes_calls_memory_and_shards_are_those_of_an_engine"
COUNTED = ESTIMATED
TIMED = "benchmarks/test_step.py::test_the_mean_is_of_all_steps_and_beside_adamws"

UNTESTED = {
    "GPU": "needs a GPU: make gpu",
    "VERSIONS": "needs other installed versions: make versions",
    "NOT OURS": "says what DeepSpeed does without ds_kfac",
}
"""Stands in place of a test id -> why no test can hold the promise here."""

PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "Supported": {
        "Each mode is tested to be equal to `tests/oracle.py`": (MODES, ADAM_MODES),
        "GPUs have run only": ("GPU",),
    },
    "Modes": {
        "ZeRO stages": (MODES, ADAM_MODES),
        "ZeRO options": (MODES, ADAM_MODES),
        "precision": (MODES, AUTOCAST),
        "several dtypes in a model": (
            "deepspeed/test_dtypes.py::test_it_does_not_matter_of_which_dtype_the_first_layer_is",
            "deepspeed/test_dtypes.py::test_results_of_a_float64_model_are_not_rounded_to_16_bits",
        ),
        "accumulation, clipping": (MODES, ADAM_MODES),
        "activation checkpointing": (STYLES,),
        "frozen parameters": (
            FROZEN,
            "deepspeed/test_traps.py::test_frozen_and_tied_parameters_are_left_alone_in_every_stage",
        ),
        "sparse gradients of an `nn.Embedding`": (
            "deepspeed/test_sparse_gradients.py"
            "::test_a_sparse_gradient_trains_as_the_dense_one_and_is_not_clipped",
        ),
        "`loss.backward()`": (STYLES,),
        "`engine.compile`": (
            "deepspeed/test_compile.py"
            "::test_compiled_training_is_the_same_in_the_graphs_of_the_plain_engine",
        ),
        "torch defaults": ("deepspeed/test_defaults.py::test_a_program_s_defaults_change_nothing",),
        "optimizer": (MODES, ADAM_MODES, REFUSED),
        "preconditioning": (
            MODES,
            FEATURES,
            "deepspeed/test_curvlinops.py::test_engines_have_curvlinops_matrices",
        ),
        "Fisher": (FEATURES, "deepspeed/test_monte_carlo.py::test_what_cannot_be_sampled_is_said"),
        "padding": (FEATURES,),
        "batches that grow": (
            "deepspeed/test_batch_ramp.py::test_it_trains_like_batches_fed_whole",
            "deepspeed/test_pipeline.py::test_a_batch_ramp_changes_the_micro_batches_of_a_pipeline",
        ),
        "checkpoints": (
            "deepspeed/test_checkpoint.py::test_resuming_gives_the_losses_of_not_stopping",
            "deepspeed/test_checkpoint.py::test_state_loads_at_any_world_size_and_stage",
            "deepspeed/test_moving.py"
            "::test_weights_step_schedule_and_adamws_moments_move_to_the_other_optimizer",
        ),
        "model parallelism": (MODEL_PARALLEL,),
    },
    "Layers": {
        "`nn.Linear`, transformers' `Conv1D`": (
            MODES,
            "model/test_scan.py::test_linear_and_conv1d_are_found_with_their_shapes",
        ),
        "`Conv1d` to `Conv3d`": (
            FEATURES,
            "model/test_images.py::test_a_pixel_of_every_call_is_a_row"
            "_and_G_has_those_of_the_convolution_nearest_to_the_loss",
        ),
        "any module that multiplies": (
            "deepspeed/test_stacks.py::test_stacked_experts_step_as_experts_apart",
            "model/test_products.py::test_a_matrix_of_a_modules_own_has_the_rows_of_its_products",
            "model/test_products.py::test_torchs_attention_has_the_rows_of_its_projections",
        ),
        "LayerNorm, RMSNorm, BatchNorm, GroupNorm": (
            FEATURES,
            "model/test_scan.py::test_norms_have_the_structure_of_their_type",
        ),
        "embeddings, and heads tied to them": (
            "model/test_scan.py::test_everything_else_is_listed_with_its_reason",
            "model/test_scan.py::test_tables_are_no_matrices",
        ),
        "The [attach report]": ("deepspeed/test_seam.py::test_the_report_lists_every_module",),
    },
    "Refused at attach": {
        "DeepCompile, ZenFlow, SuperOffload, NVMe offload": (REFUSED,),
        "Muon, 1-bit optimizers, Adagrad of several groups": (REFUSED, COMBINATIONS),
        "some [combinations of model parallelism]": (COMBINATIONS,),
        "an attach between the micro-batches of a step": (
            "deepspeed/test_gradient_access.py"
            "::test_attaching_in_the_middle_of_a_step_is_refused_and_loses_nothing",
        ),
        "in some DeepSpeed versions, modes in which ranks": (
            f"{VERSIONS}test_a_stage_that_looks_for_overflow_itself_skips_on_all_ranks",
        ),
        "ZeRO with torch_autocast fp16": (
            f"{VERSIONS}test_a_stage_that_looks_for_overflow_itself_skips_on_all_ranks",
        ),
        "ZeRO 1 on several ranks, in fp16": (
            f"{VERSIONS}test_faults_are_found_in_the_code_of_a_version",
        ),
        "fp16 at stage 0 with DeepSpeed's fused Adam": (
            f"{VERSIONS}test_faults_are_found_in_the_code_of_a_version",
        ),
    },
    "DeepSpeed versions": {
        "Any version from 0.17 on is accepted; older ones are refused": (
            f"{VERSIONS}test_an_older_deepspeed_is_refused_and_a_newer_one_is_named",
        ),
        "Tested are 0.17.0": (VERSION_TABLE,),
        "On a GPU only 0.19.8 has run": ("GPU",),
        "If your version is newer than all of these": (
            f"{VERSIONS}test_an_older_deepspeed_is_refused_and_a_newer_one_is_named",
        ),
        "In any version a self-test at attach": (
            "deepspeed/test_seam.py::test_the_self_test_notices_a_changed_layout_on_every_rank",
        ),
        "`gradient_clipping` is 0 up to 0.19.0": ("NOT OURS",),
    },
    "Faults of DeepSpeed versions": {
        "0.17.6, 0.18.0 | ZeRO 2, accumulation": (
            f"{VERSIONS}test_faults_are_found_in_the_code_of_a_version",
        ),
        "before 0.19 | ZeRO 1 and 2 with offload": (
            f"{VERSIONS}test_what_a_version_mended_is_a_known_fault_of_those_before",
        ),
        "0.18.9 | BF16_Optimizer": (
            f"{VERSIONS}test_what_a_version_mended_is_a_known_fault_of_those_before",
        ),
        "before 0.19.4 | pipelines, accumulation": (
            f"{VERSIONS}test_what_a_version_mended_is_a_known_fault_of_those_before",
        ),
        "all | ZeRO with torch's Adagrad": (REFUSED,),
        "up to 0.19.4 | ZeRO 1 with `grad_accum_dtype`": (
            f"{VERSIONS}test_faults_are_found_in_the_code_of_a_version",
        ),
        "up to 0.19.4 | ZeRO 2 on CPUs": (
            f"{VERSIONS}test_faults_are_found_in_the_code_of_a_version",
        ),
        "all | ZeRO in fp16, dynamic loss scale": (
            "deepspeed/test_kfac_adamw.py::test_a_step_is_as_long_where_the_loss_scale_grows",
        ),
        "up to 0.19.4 | ZeRO 3 with gloo": (
            f"{VERSIONS}test_faults_are_found_in_the_code_of_a_version",
        ),
        "0.17 | `ds_to_universal` at ZeRO 3": ("VERSIONS",),
    },
    "torch and Python": {
        "2.13.0 | 3.11": ("VERSIONS",),
        "2.8.0, 2.10.0": ("VERSIONS",),
        "2.13.0 | 3.10, 3.12": ("VERSIONS",),
        "mypy and pyright see the package's types": (
            "integrations/test_commands.py::test_a_users_script_passes_mypy",
        ),
    },
    "Cost": {
        "KFACAdamW needs AdamW's optimizer state plus": (ESTIMATED,),
        "The attach report prints the bytes": (ESTIMATED,),
        "step that only preconditions | 1.22": (TIMED,),
        "step that refreshes all eigenbases": (TIMED,),
        "mean at the default intervals, 10/50": (TIMED,),
        "MB that a rank sends in every step": (COUNTED,),
        "MB in a step that updates factors": (COUNTED,),
        "K-FAC state of a rank": (COUNTED,),
        "step that only preconditions | 102": ("GPU",),
        "one step in ten": ("GPU",),
        "mean at the default intervals | 102": ("GPU",),
        "reserved memory": ("GPU",),
    },
    "Model parallelism": {
        "Ulysses, by an `mpu`": (MODEL_PARALLEL,),
        "`PipelineModule`": (MODEL_PARALLEL,),
        "AutoTP": (MODEL_PARALLEL,),
        "Megatron's `ColumnParallelLinear`": (MODEL_PARALLEL,),
        "`deepspeed.moe.layer.MoE`": (MODEL_PARALLEL,),
        "AutoEP": (MODEL_PARALLEL,),
    },
    "Ulysses": {"DeepSpeed sums gradients over a sequence's ranks": (MODEL_PARALLEL,)},
    "Pipelines": {
        "In a step that updates factors, all outputs of a stage": (MODEL_PARALLEL,),
        "At stage 0 DeepSpeed clips by the norm": ("NOT OURS",),
        "A stage's arguments have no names": (MODEL_PARALLEL,),
        "Each stage takes the [scale of G]": (MODEL_PARALLEL,),
        "KFACAdamW looks for a [head by its shape]": (
            "deepspeed/test_pipeline.py"
            "::test_a_head_is_found_by_its_shape_though_the_embedding_is_in_another_stage",
        ),
    },
    "Tensor parallelism": {
        "A shard is a layer of its own": (MODEL_PARALLEL,),
        "KFACAdamW orthogonalizes each shard by itself": (SHARD_SIZE,),
        "A row-parallel bias": (MODEL_PARALLEL,),
        "Layers that are not cut": (TOGETHER,),
    },
    "Experts": {
        "A is the mean over the tokens": (MODEL_PARALLEL,),
        "Places that only fill the capacity": (
            "model/test_products.py::test_places_without_a_token_are_no_rows_of_a_stack_s_expert",
        ),
        "AutoEP replaces a model's blocks": (MODEL_PARALLEL,),
        "Name KFACAdamW in the DeepSpeed config": (MADE_BEFORE,),
        "The experts of a rank share one A": (
            "deepspeed/test_model_parallel.py"
            "::test_an_A_that_experts_share_continues_at_another_ep_size",
        ),
        "The experts run as `torch._grouped_mm`": (
            "deepspeed/test_model_parallel.py"
            "::test_grouped_experts_that_share_A_step_as_experts_in_a_loop",
        ),
        "DeepSpeed 0.19.8 with transformers 5.23": ("NOT OURS",),
        "`check` and `estimate` do not know AutoEP": (
            "estimate/test_check.py::test_a_mixture_of_experts_of_transformers_is_stepped_whole",
        ),
    },
    "Names in checkpoints": {
        "A checkpoint holds every layer of the job once": (SAVED_ONCE,),
        "K-FAC's state therefore loads with other stages and at another `ep_size`": (
            "deepspeed/test_pipeline.py"
            "::test_another_number_of_stages_takes_weights_or_kfacs_state_alone",
            SAVED_ONCE,
        ),
        "With another number of shards these layers start empty": (SAVED_ONCE,),
    },
    "Refused combinations": {
        "`mesh_param`; tensor with sequence parallelism": (REFUSED, COMBINATIONS, PARALLEL_REFUSED),
        '"reduce" weight sharing with Ulysses or experts': (PARALLEL_REFUSED,),
        "KFACAdamW with AutoTP": (PARALLEL_REFUSED,),
        "deepspeed.moe's experts at stage 3": (REFUSED, COMBINATIONS),
        "AutoEP with AutoTP": (
            COMBINATIONS,
            MADE_BEFORE,
        ),
    },
}


def sections() -> dict[str, str]:
    """Heading -> the text below it, up to the next heading."""
    parts = re.split(r"^#+ (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows_and_bullets(text: str) -> list[str]:
    """The table rows below their heads, and the first lines of bullets, without their marks."""
    tables = re.findall(r"^\|[ \-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.strip("| ") for table in tables for row in table.splitlines()]
    return rows + re.findall(r"^- (.*)$", text, re.MULTILINE)


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_sections_of_the_page_are_those_of_the_table():
    assert list(sections()) == list(PROMISES)


@pytest.mark.parametrize("section", PROMISES)
def test_every_promise_is_on_the_page_and_has_a_test(section):
    text = " ".join(sections()[section].split())
    for promise, tests in PROMISES[section].items():
        assert promise in text, f"no longer in section {section}: {promise}"
        assert tests, promise
        for test in tests:
            if test not in UNTESTED:
                file, name = test.split("::")
                assert name in functions_of(file), f"{promise}: no such test: {test}"


@pytest.mark.parametrize("section", PROMISES)
def test_every_row_and_bullet_of_the_page_is_a_promise(section):
    for line in rows_and_bullets(sections()[section]):
        promised = [promise for promise in PROMISES[section] if line.startswith(promise)]
        assert len(promised) == 1, f"{section}: {line[:60]} has the promises {promised}"
