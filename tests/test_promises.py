"""Every promise of docs/reference/supported.md has a test.

A promise is a row of a table, a bullet, or a sentence that says what is supported, equal or
refused. The table names it by its first words, under the heading of its section.
"""

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/reference/supported.md"
UNTESTED = {
    "GPU": "needs a GPU: make gpu",
    "VERSIONS": "needs other installed versions: make versions",
    "NOT_OURS": "says what DeepSpeed does without ds_kfac",
}
"""Stands in place of a test -> why no test can hold the promise here."""
TABLE = """
## Supported
Each mode is tested to be equal to `tests/oracle.py` -> test_engine_mode_matches_reference
    test_kfac_adamw_matches_reference
GPUs have run only -> GPU
## Modes
ZeRO stages / ZeRO options / accumulation, clipping -> test_engine_mode_matches_reference
    test_kfac_adamw_matches_reference
precision -> test_engine_mode_matches_reference test_autocast_matches_reference
several dtypes in a model -> test_it_does_not_matter_of_which_dtype_the_first_layer_is
    test_results_of_a_float64_model_are_not_rounded_to_16_bits
activation checkpointing / `loss.backward()` ->
    test_every_way_to_run_a_model_trains_like_the_reference
frozen parameters -> test_a_frozen_parameter_is_not_moved_whenever_it_was_frozen
sparse gradients of an `nn.Embedding` ->
    test_a_sparse_gradient_trains_as_the_dense_one_and_is_not_clipped
`engine.compile` -> test_compiled_training_is_the_same_in_the_graphs_of_the_plain_engine
torch defaults -> test_a_program_s_defaults_change_nothing
optimizer -> test_engine_mode_matches_reference test_kfac_adamw_matches_reference
    test_refusals_say_what_to_change
preconditioning -> test_engine_mode_matches_reference test_every_feature_matches_reference
    test_engines_have_curvlinops_matrices
Fisher -> test_every_feature_matches_reference test_what_cannot_be_sampled_is_said
padding -> test_every_feature_matches_reference
batches that grow -> test_it_trains_like_batches_fed_whole
    test_a_batch_ramp_changes_the_micro_batches_of_a_pipeline
checkpoints -> test_resuming_gives_the_losses_of_not_stopping
    test_state_loads_at_any_world_size_and_stage
    test_weights_step_schedule_and_adamws_moments_move_to_the_other_optimizer
model parallelism -> test_model_parallelism_matches_one_process
## Layers
`nn.Linear`, transformers' `Conv1D` -> test_engine_mode_matches_reference
    test_linear_and_conv1d_are_found_with_their_shapes
`Conv1d` to `Conv3d` -> test_every_feature_matches_reference
    test_the_hooks_have_the_factors_of_the_rule
any module that multiplies -> test_stacked_experts_step_as_experts_apart
    test_a_matrix_of_a_modules_own_has_the_rows_of_its_products
    test_torchs_attention_has_the_rows_of_its_projections
LayerNorm, RMSNorm, BatchNorm, GroupNorm -> test_every_feature_matches_reference
    test_norms_have_the_structure_of_their_type
embeddings, and heads tied to them -> test_everything_else_is_listed_with_its_reason
    test_tables_are_no_matrices
The [attach report] -> test_the_report_lists_every_module
## Refused at attach
DeepCompile, ZenFlow, SuperOffload, NVMe offload -> test_refusals_say_what_to_change
Muon, 1-bit optimizers, Adagrad with several parameter groups -> test_refusals_say_what_to_change
    test_a_combination_is_refused_with_a_remedy
some [combinations of model parallelism] -> test_a_combination_is_refused_with_a_remedy
an attach between the micro-batches of a step ->
    test_attaching_in_the_middle_of_a_step_is_refused_and_loses_nothing
in some DeepSpeed versions, modes in which ranks / ZeRO with torch_autocast fp16 ->
    test_a_stage_that_looks_for_overflow_itself_skips_on_all_ranks
ZeRO 1 on several ranks, in fp16 / fp16 at stage 0 with DeepSpeed's fused Adam ->
    test_faults_are_found_in_the_code_of_a_version
## DeepSpeed versions
Any version from 0.17 on is accepted; older ones are refused /
    If your version is newer than all of these ->
    test_an_older_deepspeed_is_refused_and_a_newer_one_is_named
The tested versions are 0.17.0 ->
    test_the_table_of_versions_has_a_row_a_tested_version_and_a_cell_a_column
On a GPU only 0.19.8 has run -> GPU
In any version, the attach self-test -> test_the_self_test_notices_a_changed_layout_on_every_rank
`gradient_clipping` is 0 up to DeepSpeed 0.19.0 -> NOT_OURS
## Faults of DeepSpeed versions
0.17.6, 0.18.0 | ZeRO 2, accumulation / up to 0.19.4 | ZeRO 1 with `grad_accum_dtype` /
    up to 0.19.4 | ZeRO 2 on CPUs / up to 0.19.4 | ZeRO 3 with gloo ->
    test_faults_are_found_in_the_code_of_a_version
before 0.19 | ZeRO 1 and 2 with offload / 0.18.9 | BF16_Optimizer /
    before 0.19.4 | pipelines, accumulation ->
    test_what_a_version_mended_is_a_known_fault_of_those_before
all | ZeRO with torch's Adagrad -> test_refusals_say_what_to_change
all | ZeRO in fp16, dynamic loss scale -> test_a_step_is_as_long_where_the_loss_scale_grows
0.17 | `ds_to_universal` at ZeRO 3 -> VERSIONS
## torch and Python
2.13.0 | 3.11 / 2.8.0, 2.10.0 / 2.13.0 | 3.10, 3.12 -> VERSIONS
mypy and pyright see the package's types -> test_a_users_script_passes_mypy
## Cost
KFACAdamW needs AdamW's optimizer state plus / The attach report prints the bytes /
    MB that a rank sends in every step / MB that a rank sends in a step that updates factors /
    K-FAC state of a rank -> test_bytes_calls_memory_and_shards_are_those_of_an_engine
step that only preconditions | 1.22 / step that refreshes all eigenbases /
    mean at the default intervals, 10/50 -> test_the_mean_is_of_all_steps_and_beside_adamws
step that only preconditions | 102 / one step in ten / mean at the default intervals | 102 /
    reserved memory -> GPU
## Model parallelism
Ulysses, by an `mpu` / `PipelineModule` / AutoTP / Megatron's `ColumnParallelLinear` /
    `deepspeed.moe.layer.MoE` / AutoEP -> test_model_parallelism_matches_one_process
## Ulysses
DeepSpeed sums gradients over a sequence's ranks -> test_model_parallelism_matches_one_process
## Pipelines
In a step that updates factors, all outputs of a stage / A stage's arguments have no names /
    Each stage takes the [scale of G] -> test_model_parallelism_matches_one_process
At stage 0 DeepSpeed clips by the norm -> NOT_OURS
KFACAdamW looks for a [head by its shape] ->
    test_a_head_is_found_by_its_shape_though_the_embedding_is_in_another_stage
## Tensor parallelism
A shard is a layer of its own / A row-parallel bias -> test_model_parallelism_matches_one_process
KFACAdamW orthogonalizes each shard by itself ->
    test_a_shard_takes_steps_of_the_size_of_a_whole_layers
Layers that are not cut -> test_with_everything_on_what_several_ranks_have_is_the_same_bits
## Experts
A is the mean over the tokens / AutoEP replaces a model's blocks ->
    test_model_parallelism_matches_one_process
Empty slots do not count -> test_places_without_a_token_are_no_rows_of_a_stack_s_expert
Name KFACAdamW in the DeepSpeed config ->
    test_an_optimizer_made_before_the_layers_were_replaced_is_refused
The experts of a rank share one A -> test_an_A_that_experts_share_continues_at_another_ep_size
The experts run as `torch._grouped_mm` ->
    test_grouped_experts_that_share_A_step_as_experts_in_a_loop
DeepSpeed 0.19.8 with transformers 5.23 -> NOT_OURS
`check` and `estimate` do not know AutoEP ->
    test_a_mixture_of_experts_of_transformers_is_stepped_whole
## Names in checkpoints
A checkpoint holds every layer of the job once /
    With another number of shards these layers start empty ->
    test_a_checkpoint_holds_every_layer_of_the_job_once
K-FAC's state therefore loads with other pipeline stages and another `ep_size` ->
    test_another_number_of_stages_takes_weights_or_kfacs_state_alone
    test_a_checkpoint_holds_every_layer_of_the_job_once
## Refused combinations
`mesh_param`; tensor with sequence parallelism -> test_refusals_say_what_to_change
    test_a_combination_is_refused_with_a_remedy
    test_what_model_parallelism_cannot_do_is_refused_on_every_rank
"reduce" weight sharing with Ulysses or experts / KFACAdamW with AutoTP ->
    test_what_model_parallelism_cannot_do_is_refused_on_every_rank
deepspeed.moe's experts at stage 3 -> test_refusals_say_what_to_change
    test_a_combination_is_refused_with_a_remedy
AutoEP with AutoTP -> test_a_combination_is_refused_with_a_remedy
    test_an_optimizer_made_before_the_layers_were_replaced_is_refused
"""
"""Promises of a section / other promises of it -> names of their tests."""


def read(table: str) -> dict[str, dict[str, list[str]]]:
    """Section -> promise -> names of tests."""
    promises: dict[str, dict[str, list[str]]] = {}
    for line in table.replace("\n    ", " ").strip().splitlines():
        if line.startswith("## "):
            section = promises.setdefault(line.removeprefix("## "), {})
        else:
            alike, tests = line.split(" -> ")
            section |= dict.fromkeys(alike.split(" / "), tests.split())
    return promises


PROMISES = read(TABLE)


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
def names_of_tests() -> set[str]:
    """The names of all tests."""
    files = TESTS.rglob("test_*.py")
    return {
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }


def test_the_sections_of_the_page_are_those_of_the_table():
    assert list(sections()) == list(PROMISES)


@pytest.mark.parametrize("section", PROMISES)
def test_every_promise_is_on_the_page_and_has_a_test(section):
    text = " ".join(sections()[section].split())
    for promise, names in PROMISES[section].items():
        assert promise in text, f"no longer in section {section}: {promise}"
        missing = set(names) - names_of_tests() - UNTESTED.keys()
        assert names and not missing, f"{promise}: no such test: {missing}"


@pytest.mark.parametrize("section", PROMISES)
def test_every_row_and_bullet_of_the_page_is_a_promise(section):
    for line in rows_and_bullets(sections()[section]):
        promised = [promise for promise in PROMISES[section] if line.startswith(promise)]
        assert len(promised) == 1, f"{section}: {line[:60]} has the promises {promised}"
