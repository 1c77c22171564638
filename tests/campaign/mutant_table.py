"""The mutants: what is changed, and the cheapest tests that should notice.

The old text is a part of a line that occurs once in its file. Where the same computation exists
more than once (C++ and torch, one layer and a stack) the tests named are those of the one that is
changed.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """``file`` is below ds_kfac; ``tests`` are arguments of pytest, separated by blanks."""

    name: str
    file: str
    old: str
    new: str
    tests: str


_OPS, _CALLS = "ops/functional.py", "tests/ops/test_calls.py::test_torch"
_PROOF, _RULE = "tests/model/test_proof.py", "tests/model/test_rule.py"
_SAVED = "tests/deepspeed/test_saved_state.py"
_RAMP = "tests/deepspeed/test_batch_ramp.py"
_COPIES = "tests/deepspeed/test_tensor_parallel.py::" + (
    "test_copies_are_the_same_bits_where_shards_differ_in_size_and_results_travel_in_16_bits"
)
_FIT = "tests/factors/test_fit.py"
_FEATURES = "tests/deepspeed/test_features.py::test_every_feature_matches_reference"
_HOOKS = "tests/deepspeed/test_report.py"
_ACCESS = "tests/deepspeed/test_gradient_access.py"
_TRAPS, _KFAC_ADAMW = "tests/deepspeed/test_traps.py", "tests/deepspeed/test_kfac_adamw.py"

_ROWS = {
    (_OPS, _CALLS): [
        (
            "adam: first moment not corrected",
            "(1 - beta1) / (1 - power)",
            "(1 - beta1) / (1 - 0 * power)",
        ),
        ("adam: second moment not corrected", "usable / (1 - beta2**k)", "usable * (k / k)"),
        ("adam: Nesterov corrected as Adam", "(1 - beta1 * power)", "(1 - power)"),
        ("adam: eps under the root", ".sqrt_().add_(added)", ".add_(added).sqrt_()"),
        ("adam: an unusable gradient's NaN", "ignored = usable == 0", "ignored = usable < 0"),
        (
            "adam: moments fade without a gradient",
            "(1 - beta1) * usable, (1 - beta2) * usable",
            "(1 - beta1), (1 - beta2)",
        ),
        (
            "adam: the direction of a momentum without a gradient",
            "(1 - beta1 * power) * usable",
            "(1 - beta1 * power)",
        ),
        ("adam: unusable gradients are counted", "updates_n.add_(usable_n)", "updates_n.add_(1)"),
        ("ema: sum not divided by its count", "(sum_P / count.clamp(min=1))", "(sum_P / 1)"),
        (
            "ema: no bias correction",
            "torch.clamp(1 - 1 / update.clamp(min=1), max=decay)",
            "torch.full_like(update, decay)",
        ),
        ("ema: batch without rows counts", "usable = (count > 0) & torch", "usable = torch"),
        (
            "syrk: corner of the bias unscaled",
            "tail[dim].add_(count * scale)",
            "tail[dim].add_(count)",
        ),
        ("syrk: bias row unscaled", "_times_(x_ND.sum(dim=0), scale)", "x_ND.sum(dim=0)"),
        (
            "syrk: rows that do not count are in the bias",
            "len(x_ND) if kept is None else kept.sum(dtype=torch.float32)",
            "len(x_ND)",
        ),
        (
            "syrk: NaN of a row that does not count",
            "torch.where(kept[:, None], x_ND, 0.0)",
            "(x_ND * kept[:, None])",
        ),
        (
            "block syrk: wrong columns",
            "view(rows, dim // block, block).transpose(0, 1)",
            "view(rows, block, dim // block).permute(2, 0, 1)",
        ),
        ("unpack: diagonal doubled", "lower_DD.tril(-1).T", "lower_DD.tril().T"),
        ("unpack: upper triangle zero", "lower_DD + lower_DD.tril(-1).T", "lower_DD"),
        (
            "finish: a result's parts take the first one's size",
            "(of_matrix[part::parts, None, None] for",
            "(of_matrix[::parts, None, None] for",
        ),
        ("finish: NaN where nothing is used", ".masked_fill_(part_zero, 0.0)", ".mul_(~part_zero)"),
        ("finish: a direction that is not finite", "(used_n & (norm_n < math.inf))", "used_n"),
    ],
    (
        "model/capture.py",
        "tests/deepspeed/test_compile.py::test_a_trace_and_an_export_in_a_captured_step_have_the_"
        "operations_of_the_model_alone",
    ): [
        ("a trace is a batch", "if is_traced or torch._C", "if torch._C"),
        ("an export is a batch", " and not torch.compiler.is_exporting()", ""),
    ],
    ("engine/preflight.py", "tests/deepspeed/test_interruptions.py"): [
        ("an optimizer object of other parameters", '[group["params"] for group in groups]', "[]")
    ],
    ("curvature/factor.py", "tests/curvature/test_history.py"): [
        ("norm of a change: diagonal counted twice", "- _squares(diagonals)).sqrt()", ").sqrt()"),
        ("norm of a change: of its first piece alone", "part.sum() for part", "part[0] for part"),
    ],
    ("directions/kfac_gradient.py", "tests/directions/test_precondition.py"): [
        ("relative damping is absolute", "damping * mean_n[:, None, None]", "damping"),
        (
            "kl-clip without root",
            "torch.sqrt(kl_clip / quadratic.abs())",
            "(kl_clip / quadratic.abs())",
        ),
        ("kl-clip enlarges steps", ".clamp(max=1.0)\n", "\n"),
    ],
    ("curvature/inverse.py", "tests/curvature/test_inverse.py"): [
        ("pi is upside down", "(value * mean / partner)", "(value * partner / mean)"),
        ("factored damping without root", "value**0.5 * mean", "value * mean"),
        ("inverse of two identities", "(1 + damping**0.5) ** 2", "(1 + damping) ** 2"),
        ("inverse whose partner is an identity", "if with_identity else 1.0", "if False else 1.0"),
        (
            "mean of an identity",
            "else factor.packed_P.new_ones(())",
            "else factor.packed_P.new_full((), float(factor.side.dim))",
        ),
    ],
    (
        "directions/kfac_gradient.py",
        "tests/directions/test_precondition.py tests/update/test_moments.py",
    ): [
        (
            "damping kind of EKFAC dropped",
            'layer_mean=rotation.layer_mean if damping_kind == "relative" else None',
            "layer_mean=None",
        )
    ],
    ("curvature/iteration.py", "tests/curvature/test_iteration.py"): [
        ("iteration: order of the last basis", "descending=True, stable=True", "stable=True"),
        ("iteration: rounding turns null directions", "* EPS * Q_nbb", "* 0.0 * Q_nbb"),
        (
            "iteration: one pass of Cholesky-QR",
            "for shift in (_shift(C_nbb.shape[-1]), 0.0):",
            "for shift in (_shift(C_nbb.shape[-1]),):",
        ),
    ],
    ("schedule/timetable.py", "tests/schedule/test_timetable.py"): [
        ("iteration: never from nothing again", "return now > past", "return past < 1"),
        (
            "adaptive: refreshes without a new one due",
            "if refreshes > schedule",
            "if refreshes >= schedule",
        ),
        ("adaptive: waits one capture longer", ">= clock.interval:", "> clock.interval:"),
        (
            "adaptive: a record that was not read is lost",
            "            self.settle()\n            self._unread =",
            "            self._unread =",
        ),
        (
            "explain: sat out updates are not waited for",
            "/ clock.interval) * clock.interval",
            "/ clock.interval)",
        ),
    ],
    ("ops/functional.py", "tests/update/test_newton_schulz.py"): [
        ("orthogonal: what fades out does not", ".clamp(max=1) / norm", ".clamp(min=1) / norm")
    ],
    ("update/newton_schulz.py", "tests/update/test_newton_schulz.py"): [
        ("orthogonal: coefficients swapped", "beta=b, alpha=c", "beta=c, alpha=b"),
        (
            "orthogonal: Gram matrix multiplied once",
            "torch.matmul(spare_mm, p_mm, out=r_mm)",
            "r_mm.copy_(spare_mm)",
        ),
        ("orthogonal: no restart in 16 bits", "if half else (STEPS,)", "if False else (STEPS,)"),
        ("whitened on one side", "else s, out=rows", "else 1, out=rows"),
        (
            "null directions: counted in a direction's size",
            "linalg.vector_norm(norm * whitening, dim=-1)",
            "linalg.vector_norm(norm * torch.stack([1 + 0 * norm, whitening[1]]), dim=-1)",
        ),
        (
            "directions: a copy for the factors",
            "            rows.copy_(part)",
            "            rows.clone().copy_(part)",
        ),
    ],
    ("update/rotation.py", "tests/update/test_rotation.py"): [
        ("null directions: stepped along, whitened", "** -power * self.range_A", "** -power"),
        (
            "null directions: stepped along by a head",
            "x_nOI.mul_(self.range_A[:, None, :])",
            "pass",
        ),
        (
            "null directions: of G none",
            "range_mask(self.G, self.values_G)",
            "torch.ones_like(self.values_G)",
        ),
        (
            "null directions: a narrow factor's bound",
            "max(LEAST, group.shape[1] ** 0.5)",
            "group.shape[1] ** 0.5",
        ),
        ("null directions: a wide factor's bound", "max(LEAST, group.shape[1] ** 0.5)", "LEAST"),
        ("null directions: of a zero A all", "blocks >= rounding", "blocks > rounding"),
        (
            "large moments are not turned",
            "rows.copy_(block_product((), rows, right))\n\n\ndef _overlap",
            "pass\n\n\ndef _overlap",
        ),
    ],
    ("update/rotation.py", "tests/deepspeed/test_null_directions.py"): [
        ("null directions: of G stepped along", "x_nOI.mul_(self.range_G[:, :, None])", "pass")
    ],
    ("directions/kfac_adamw/direction.py", "tests/deepspeed/test_null_directions.py"): [
        (
            "null directions: of G where it is orthogonalized",
            "columns=not step.orthogonal)",
            "columns=True) if not step.orthogonal else None",
        )
    ],
    ("ops/functional.py", "tests/ops/test_ops.py"): [
        ("narrow sums: row after row", "NARROW, CHUNK_ROWS = 16", "NARROW, CHUNK_ROWS = 0")
    ],
    ("update/rotation.py", "tests/update/test_newton_schulz.py"): [
        ("whitening by whole eigenvalues", "** -power", "** -1")
    ],
    ("update/state.py", "tests/directions/test_precondition.py tests/update/test_moments.py"): [
        (
            "EKFAC: no bias correction",
            "torch.clamp(1 - 1 / self.updates.clamp(min=1), max=decay)",
            "torch.full_like(self.updates, decay)",
        ),
        ("EKFAC: mean eigenvalue not divided", "(size / count)", "size"),
    ],
    ("update/state.py", "tests/update/test_moments.py"): [
        ("EKFAC: unusable gradient counted", "self.updates.add_(usable)", "self.updates.add_(1)"),
        (
            "EKFAC: unusable gradient folded in",
            "torch.where(usable[:, None, None], averaged, second, out=second)",
            "second.copy_(averaged)",
        ),
    ],
    ("update/rotation.py", "tests/update/test_moments.py"): [
        (
            "moments not rotated at a refresh",
            "x_nOI.copy_(block_product(left, x_nOI, right))",
            "pass",
        ),
        ("moments rotated backwards", "before.mT @ now for", "now.mT @ before for"),
    ],
    ("update/state.py", "tests/update/test_group.py"): [
        (
            "moving: AdamW's moments do not go into the first basis",
            "self.first_OI, old, new)\n        if old is None:",
            "self.first_OI, old, new)\n        if False:",
        ),
        (
            "moments: the first one stays in the last basis",
            "change_basis_(self.first_OI, old, new)",
            "pass",
        ),
    ],
    ("step/preconditioner.py", "tests/deepspeed/test_numpy.py"): [
        (
            "a new basis is used from the next step on",
            "group.rebase(index, **bases)",
            "vars(self).setdefault('late', []).append((group, index, bases)); "
            "[g.rebase(i, **b) for g, i, b in self.late[:-9]]",
        )
    ],
    ("step/factors.py", "tests/step/test_unproven.py"): [
        (
            "proof: a layer that fits again waits for a refresh",
            "self.ready.difference_update(keys)",
            "pass",
        ),
        (
            "proof: what does not fit keeps its factors",
            "self.factors[key] = self._empty(self.specs[key])",
            "pass",
        ),
    ],
    ("model/products.py", "tests/model/test_products.py"): [
        ("products: a nested input", " and not x.is_nested", ""),
        ("einsum: gradient in the order of the output", ".permute(sums.output)", ""),
        (
            "einsum: memory of the base forgotten",
            "in_memory.as_strided(shape, stride, offset)",
            "in_memory.reshape(shape)",
        ),
        (
            "left product: columns taken for rows",
            "gradient = gradient.mT",
            "pass",
        ),
        (
            "grouped products: rows behind the groups count",
            "return slice(0, ends[-1]) if",
            "return EVERY if",
        ),
    ],
    ("curvature/factor.py", "tests/step/test_unusual.py"): [
        ("counters: a batch that is not finite is silent", "~used]", "counts <= 0]")
    ],
    ("step/preconditioner.py", "tests/deepspeed/test_iteration.py"): [
        (
            "iteration: from the first layer's basis",
            "next(self.places[name] for name in factor.layers if name in self.places)",
            "self.places[factor.layers[0]]",
        )
    ],
    ("update/rotation.py", "tests/update/test_group.py"): [
        ("group: slices in another order", "values[index]) for Q", "values[-index - 1]) for Q")
    ],
    ("update/rotation.py", "tests/curvature/test_precision.py"): [
        ("rotation: G not transposed", "[vectors.mT for vectors in self.G]", "list(self.G)")
    ],
    ("update/groups.py", "tests/update/test_group.py"): [
        (
            "moments turned from the layer's own coordinates",
            "change_basis_(before.basis,",
            "change_basis_(None,",
        ),
        (
            "group: new eigenvectors are not put in place",
            "[*vectors, values])",
            "[*place.vectors, values])",
        ),
        ("group: constants of the last basis", "self._stacked.follow()", "pass"),
        (
            "group: a layer that has left its basis is rotated",
            "            _copy_basis_(place.A, None)\n",
            "",
        ),
        (
            "group: moments stay in a basis that is left",
            "state.moments.unrotated(state.basis)",
            "state.moments",
        ),
        (
            "group: without any basis the identity stays",
            "self._stacked if any(self.prepared) else None",
            "self._stacked",
        ),
        (
            "group: a loaded layer keeps the moments it had",
            "state.moments or moments.empty(self.layers[index].shape, self.device)",
            "state.moments or moments",
        ),
    ],
    ("directions/kfac_gradient.py", "tests/directions/test_direction_scales.py"): [
        (
            "group: a layer without a basis is preconditioned",
            "torch.where(on[:, None, None], V, gradient)",
            "V",
        ),
        ("group: a layer without a basis is in kl-clip's sum", "dot.masked_fill(~on, 0.0)", "dot"),
        (
            "group: moments of a layer without a basis change",
            "norm = norm.masked_fill(~on, torch.nan)",
            "pass",
        ),
        (
            "stacked results in another order",
            "tensors.put(group, V)",
            "tensors.put(group, V.flip(0))",
        ),
        (
            "experts: copies counted more than once",
            "return dot / group.layers[0].copies",
            "return dot",
        ),
    ],
    ("curvature/factor.py", "tests/curvature/test_side.py"): [
        ("blocks: bias column is zero", "(0, 1), value=1.0", "(0, 1), value=0.0"),
        ("blocks: scale dropped", "block=width, kept=kept, scale=scale", "block=width, kept=kept"),
        (
            "blocks: every row counts",
            "block=width, kept=kept, scale=scale",
            "block=width, scale=scale",
        ),
        ("blocks: uneven", "-(-dim // -(-dim // longest))", "longest"),
    ],
    ("model/product_code.py", "tests/model/test_products.py"): [
        ("einsum: a matrix in two ways", "unclear.add(name)", "pass"),
        (
            "an einsum with a matrix of a stack is one with all of it",
            "layout = MatrixLayout(layout.transposed)",
            "pass",
        ),
        ("a bounded weight is lost", '{"clamp", "clip"}', "set()"),
    ],
    ("model/scan.py", "tests/model/test_products.py"): [
        (
            "a weight that is lent, called as a module",
            "            is_product = True",
            "            pass",
        )
    ],
    ("model/scan.py", "tests/model/test_capture_images.py"): [
        ("a convolution of its own heard as a module", "product = convolves(module)", "pass")
    ],
    ("model/capture.py", "tests/model/test_capture_images.py"): [
        (
            "another window taken for the module's",
            "if product.window != tuple(",
            "if False and tuple(",
        )
    ],
    ("model/product_code.py", "tests/model/test_capture_images.py"): [
        ("a computed weight taken for the parameter", " - set(code.set_here)", "")
    ],
    ("model/scan.py", "tests/model/test_scan.py"): [
        (
            "a bias that is only held is used",
            "for user in others if _kind(self.modules[user])[1] is None]",
            "for user in others]",
        ),
        (
            "a table that is multiplied is a layer",
            "if weight in self.tables:",
            "if False:",
        ),
        ("modules of one weight, biases apart", "len(biases) == 1 and", ""),
        (
            "inputs limited as vocabularies",
            "(LONGEST if choice.gradients else LONGEST_INPUT)",
            "LONGEST",
        ),
        ("no curvature: factors are kept", "not choice.curvature or", "False or"),
    ],
    ("model/share.py", "tests/model/test_scan.py"): [
        ("tables that are broadcast are matrices", "1 not in shape[:-1]", "True")
    ],
    ("model/product_code.py", "tests/model/test_scan.py"): [
        ("a stack's matrices are rows of a table", "- removed_dims < 2:", "- removed_dims < 3:"),
        ("a product of two parameters makes a layer", " or product.other in parameters:", ":"),
    ],
    (
        "model/product_code.py",
        "tests/model/test_products.py::test_a_view_that_is_no_stack_is_none",
    ): [
        (
            "rows viewed as a stack: cut anywhere",
            "return count if shape[0] % count == 0 else 1",
            "return count",
        )
    ],
    (
        "model/scan.py",
        "tests/model/test_products.py::test_rows_that_are_viewed_as_a_stack_are_a_matrix_each",
    ): [("rows viewed as a stack: a borrowed weight is whole", "if borrowed > 1:", "if False:")],
    ("model/products.py", "tests/model/test_product_rows.py"): [
        (
            "an einsum with a part of a stack is one with all of it",
            "return place.shape[0] == count and ",
            "return ",
        ),
        (
            "a weight's rows are inputs",
            "if place is None or self.places.is_weight(x)",
            "if place is None",
        ),
        ("alpha of addmm forgotten", "gradient if scale == 1 else gradient * scale", "gradient"),
        ("every second row is taken for the first ones", "(O == 1 or stride_O == I)", "True"),
        (
            "the first dimension is the stack's",
            "front = output.ndim - len(place.shape) + stack_dim",
            "front = stack_dim",
        ),
    ],
    ("model/places.py", "tests/model/test_product_rows.py"): [
        ("bounded elements have the copy's gradient", "or not torch.equal(output, source)", ""),
        ("a copy changed in place is the weight", "or version != base._version", ""),
        (
            "a weight with another gradient is the weight",
            "or leaf_of(tensor, PASSES) is not place.param",
            "",
        ),
        ("a stack whose rows are picked from the end", "index.remainder(place.shape[0])", "index"),
    ],
    (
        "model/products.py",
        "tests/model/test_product_rows.py::"
        "test_what_is_no_product_with_the_parameter_itself_has_no_rows",
    ): [("a bias has the gradient of scaled rows", "and not product.biased", "and False")],
    ("model/capture.py", "tests/model/test_products.py"): [
        (
            "only in the forward of the module around",
            '(around, around.rpartition(".")[0])',
            "(around,)",
        )
    ],
    ("curvature/factor.py", "tests/curvature/test_factor.py"): [
        ("a zero factor is usable", " & (sizes > 0)", ""),
        ("a spike is averaged", "over.clamp(min=1)", "torch.ones_like(over)"),
        ("spikes are limited from the start", ">= SETTLED", ">= 0"),
    ],
    ("schedule/timetable.py", "tests/curvature/test_history.py"): [
        ("adaptive: a change does not halve", "max(1, interval // 2)", "max(1, interval - 1)"),
        ("adaptive: grows by doubling", "return interval + previous,", "return 2 * interval,"),
    ],
    ("step/factors.py", "tests/deepspeed/test_refresh.py"): [
        (
            "adaptive: sat out updates not decayed",
            "decay ** self.timetable.clocks[key].interval",
            "decay",
        )
    ],
    # found by the proof alone, whatever other tests there are of such faults
    ("model/capture.py", _PROOF): [
        (
            "proof: another operand",
            "x = inputs[0] if inputs else",
            "x = torch.randn_like(inputs[0]) if inputs else",
        ),
        (
            "proof: a stale copy",
            "x = inputs[0] if inputs else",
            "x = 1.01 * inputs[0] if inputs else",
        ),
    ],
    ("model/proof.py", _PROOF): [
        ("proof: TF32 is unknown", 'TF32 if images or device.type != "cpu" else 0.0)', "0.0)"),
        ("proof: no rounding of long sides", "t_2MP.norm(dim=-1) + size_M", "t_2MP.norm(dim=-1)"),
        (
            "proof: probes of a layer, not of its A",
            "narrow = layer.A.dim < NARROW * layer.groups",
            "narrow = min(layer.shape[-2:]) < NARROW",
        ),
    ],
    ("step/proving.py", "tests/step/test_proving.py"): [
        (
            "proof: only the first step proves",
            "self._wait = 0 if verdict.open or self.again else wait(self._number)",
            "self._wait = 10**9",
        )
    ],
    ("model/shared.py", "tests/deepspeed/test_heads.py"): [
        (
            "the first layer's rows are those of an input",
            "self.with_gradient | other.with_gradient",
            "self.with_gradient | False & other.with_gradient",
        )
    ],
    ("directions/kfac_adamw/group_step.py", "tests/estimate/test_check.py"): [
        (
            "a head is found by its name alone",
            "guessed = layer.makes_words and",
            "guessed = False and",
        )
    ],
    ("step/factors.py", "tests/deepspeed/test_dead_experts.py"): [
        (
            "a common A asks its first layer alone",
            "for name in spec.layers]\n",
            "for name in spec.layers[:1]]\n",
        ),
        (
            "a factor waits for those of its layers",
            "waiting = {key for key in update.due.capture - self.ready if",
            "waiting = {key for key in update.due.capture if {spec.key for name in "
            "self.specs[key].layers for spec in "
            "self.of_layer[name].values()} - self.ready if",
        ),
    ],
    ("step/job.py", "tests/deepspeed/test_lifecycle.py"): [
        ("an interrupted step's rows stay", "kfac.resume(after_error=True)", "pass")
    ],
    ("directions/kfac_adamw/optimizer.py", "tests/deepspeed/test_kfac_adamw.py"): [
        (
            "rates of a group's parts are not compared",
            "any(part[key] != parts[0][key] for part in parts)",
            "False",
        )
    ],
    (
        "directions/kfac_adamw/direction.py",
        f"{_KFAC_ADAMW}::test_moments_that_a_program_takes_from_the_optimizers_state_begin_at_zero"
        f" {_KFAC_ADAMW}::"
        "test_loaded_moments_of_a_layer_without_a_step_stay_where_anothers_are_taken_away",
    ): [
        (
            "reset: all layers' moments, whosever state was taken away",
            "if weight in taken_away or weight not in stepped:",
            "if True:",
        ),
        ("reset: flat parameters are of no layer", " or weight not in stepped:", ":"),
    ],
    ("zero/layout.py", "tests/deepspeed/test_dtypes.py"): [
        (
            "proof: DeepSpeed's dtype of sums is unknown",
            "return dtypes | deepspeed_versions.reduced_in(self.engine)",
            "return dtypes",
        ),
        (
            "stage 0: the first layer's dtype is all of theirs",
            'reduce(torch.promote_types, map(attrgetter("dtype"), self.params))',
            "self.params[0].dtype",
        ),
    ],
    ("zero/seam.py", "tests/deepspeed/test_sparse_gradients.py"): [
        ("stage 0: the norm of sparse gradients is taken", "if not gradient.is_sparse]", "]")
    ],
    ("plan/plan.py", "tests/plan/test_make_plan.py"): [
        (
            "float64 is taken for 16 bits",
            "torch.bfloat16 if parameters.itemsize == 2 else torch.float32",
            "torch.float32 if parameters is torch.float32 else torch.bfloat16",
        )
    ],
    ("zero/layout.py", "tests/step/test_unproven.py"): [
        (
            "proof: a wire of torch_autocast is unknown",
            "            *map(deepspeed_versions.sent_in, self.params),\n",
            "",
        )
    ],
    ("step/preconditioner.py", "tests/step/test_proving.py"): [
        (
            "proof: what does not fit keeps its curvature",
            "if group.prepared[index]:\n                group.leave",
            "if False:\n                group.leave",
        )
    ],
    ("step/preconditioner.py", "tests/step/test_unproven.py"): [
        (
            "proof: factors of what does not fit stay in use",
            "self.curvature.forget(self.curvature.of_none_but(verdict.unfit))",
            "pass",
        )
    ],
    ("model/products.py", "tests/model/test_calls.py"): [
        (
            "products: other threads are watched",
            "if is_inactive and not thread.depth:",
            "if False:",
        ),
        (
            "products: not where they are recomputed",
            "begins = all(",
            "begins = not self.inside and all(",
        ),
    ],
    ("model/convolutions.py", "tests/model/test_rows.py"): [
        ("the sample stays", ">> 31) % stride", ">> 31) * 0 % stride")
    ],
    ("directions/kfac_adamw/direction.py", "tests/deepspeed/test_spikes.py"): [
        ("huge gradients enter moments", " < LARGEST", " < float('inf')")
    ],
    ("directions/kfac_adamw/direction.py", "tests/deepspeed/test_unused.py"): [
        (
            "unused layers step",
            "(largest > 0) & (largest < LARGEST) &",
            "(largest >= 0) & (largest < LARGEST) &",
        )
    ],
    ("model/blocks.py", "tests/directions/test_adam_choice.py"): [
        ("patterns match inside a name", ')$", name)', ')", name)')
    ],
    ("checkpoint/load.py", "tests/deepspeed/test_moving.py"): [
        (
            "moving: KFACAdamW begins without AdamW's moments",
            "take_adamws(job, other_values)",
            "pass",
        )
    ],
    ("checkpoint/load.py", "tests/deepspeed/test_resuming.py"): [
        (
            "resuming: a model in another order is loaded",
            "check_order(order_of(engine), ",
            "print(order_of(engine), ",
        )
    ],
    ("checkpoint/moving.py", "tests/deepspeed/test_resuming.py"): [
        (
            "resuming: fp32 weights stay those of the start",
            'getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()',
            "pass",
        )
    ],
    ("checkpoint/moving.py", "tests/deepspeed/test_moving.py"): [
        (
            "moving: KFACAdamW's zeros become AdamW's moments",
            "state = {} if entry.by_kfac else",
            "state =",
        ),
        (
            "moving: settings of the saved groups",
            "zip(engine.basic_optimizer.param_groups, settings, strict=True)",
            "()",
        ),
    ],
    ("engine/recipes.py", "tests/test_recipes.py"): [
        (
            "recipes: only the rate counts",
            "if _decay_apart(nearest, weight_decay) > LIMIT:",
            "if False:",
        )
    ],
    ("checkpoint/load.py", "tests/deepspeed/test_checkpoint_faults.py"): [
        ("a torn tag loads", "if len(set(everyone)) > 1:", "if False:")
    ],
    ("checkpoint/files.py", "tests/deepspeed/test_damaged_checkpoints.py"): [
        (
            "a save of another version loads",
            "if saved_format != FORMAT:",
            "if False:",
        ),
        ("checksums are not compared", "if zlib.crc32(data) != entry.crc32:", "if False:"),
    ],
    ("model/layers.py", "tests/model/test_layer_matrix.py"): [
        (
            "Conv1D's result not transposed",
            "(weight_OI.mT if self.transposed else weight_OI)",
            "weight_OI",
        ),
        (
            "Conv1D's gradient not transposed",
            "weight_OI = weight.view(*groups, -1, O).mT",
            "weight_OI = weight.view(*groups, O, -1)",
        ),
    ],
    ("model/registry.py", "tests/model/test_layer_matrix.py"): [
        (
            "norm: weight and bias swapped",
            "pairs[:, 0].contiguous(), pairs[:, 1].contiguous()",
            "pairs[:, 1].contiguous(), pairs[:, 0].contiguous()",
        ),
        ("norm: eps dropped", "keepdim=True) + eps", "keepdim=True)"),
    ],
    (
        "model/layers.py",
        "tests/deepspeed/test_tensor_parallel.py::test_shards_match_one_process[2]",
    ): [
        (
            "tensor parallel: another rank's columns",
            "sum(sizes[: module.tp_index])",
            "sum(sizes[: 1 - module.tp_index])",
        )
    ],
    ("model/sampled_loss.py", "tests/model/test_sampled_loss.py"): [
        (
            "mse: variance not halved",
            "outputs.shape[-1] / 2 if mean else 0.5",
            "outputs.shape[-1] if mean else 0.5",
        ),
        (
            "samples: terms that the loss has not",
            "weights = reached.reshape(-1).to(values.dtype)",
            "weights = torch.ones_like(reached.reshape(-1).to(values.dtype))",
        ),
        ("Gumbel noise with the wrong sign", "(flat - torch.log(", "(flat + torch.log("),
    ],
    (
        "engine/monte_carlo.py",
        "tests/model/test_sampled_loss.py tests/deepspeed/test_monte_carlo.py",
    ): [
        ("equal draws on every rank", " + self.kfac.rank", ""),
        ("equal draws in every micro-batch", "self._drawn += 1", "pass"),
        ("equal draws in every step", "self._step * 1_000_003", "0"),
    ],
    ("schedule/timetable.py", "tests/schedule/test_schedule.py"): [
        ("cosine upside down", "(1 - math.cos(", "(1 + math.cos("),
        (
            "piecewise: a step late",
            "self.values[bisect_right(self.steps, step)]",
            "self.values[bisect_right(self.steps, step - 1)]",
        ),
        (
            "burn-in ends a step late",
            "if burn_in and step < burn_in.steps:",
            "if burn_in and step <= burn_in.steps:",
        ),
        (
            "interval off by one",
            "captures = step >= walked.captures[-1]",
            "captures = step > walked.captures[-1]",
        ),
        ("interval rounded down", "self.at(step) + 0.5", "self.at(step)"),
        (
            "displaced by one more",
            "refreshes = step == start + offset",
            "refreshes = step == start + offset + 1",
        ),
        (
            "burn-in all at once",
            "start, offset = 0, (offset // later",
            "start, offset = 0, 0 * (offset // later",
        ),
    ],
    ("assignment/assign.py", "tests/assignment/test_stagger.py"): [
        ("stagger: lightest first", "(-seconds[key]", "(seconds[key]")
    ],
    ("assignment/assign.py", "tests/assignment/test_grid.py tests/assignment/test_assign.py"): [
        (
            "grid: columns are rows",
            "range(index, world, world // workers)",
            "range(index * workers, (index + 1) * workers)",
        )
    ],
    ("zero/shards.py", "tests/zero/test_relayout.py tests/assignment/test_grid.py"): [
        (
            "grid: wrong source of a result",
            "workers[rank // (world // len(workers))]",
            "workers[rank % len(workers)]",
        )
    ],
    ("curvature/methods.py", "tests/assignment/test_memory.py tests/assignment/test_assign.py"): [
        (
            "memory: eigenvalues forgotten",
            '"eigenvalues", lambda side: side.dim',
            '"eigenvalues", lambda side: 0',
        )
    ],
    ("assignment/costs.py", "tests/assignment/test_memory.py tests/assignment/test_assign.py"): [
        (
            "memory: counter of a factor forgotten",
            "return 4 * side.numel + 4",
            "return 4 * side.numel",
        )
    ],
    ("estimate/estimates.py", "tests/estimate tests/deepspeed/test_estimate.py"): [
        (
            "estimate: the history forgotten",
            "bool(plan.adaptive) * self._on_homes",
            "0 * self._on_homes",
        )
    ],
    ("zero/shards.py", "tests/zero/test_relayout.py"): [
        (
            "sharded gradients: the wrong ones are in place",
            "if shard.rank == workers[shard.param][0]\n",
            "if shard.rank != workers[shard.param][0]\n",
        )
    ],
    ("zero/deepspeed_versions.py", "tests/zero/test_deepspeed_versions.py"): [
        ("versions: offsets are ends", "initial=0)\n    )[:-1]", "initial=0)\n    )[1:]")
    ],
    ("zero/shards.py", "tests/deepspeed/test_estimate.py"): [
        ("round robin ignored by the plan", "step = world if round_robin else 1", "step = 1")
    ],
    ("engine/refusals.py", "tests/deepspeed/test_one_config.py"): [
        ("a config of its own on a rank goes unnoticed", "if rank is not None:", "if False:")
    ],
    ("comm/lost.py", "tests/deepspeed/test_lost_ranks.py"): [
        ("a note of what raised stays for ever", "        if _noted:\n", "        if False:\n"),
        ("a rank that raises leaves no note", '_store().set(f"{NOTE}', 'str(f"{NOTE}'),
        ("a rank that died is not missed", "if notes or not missing:", "if True:"),
    ],
    (
        "engine/pipeline.py",
        "tests/deepspeed/test_pipeline.py::test_a_stage_with_two_outputs_matches_one_process",
    ): [("pipelines: outputs run backward one by one", "if len(floating) < 2:", "if True:")],
    ("step/messages.py", "tests/deepspeed/test_partly_used.py"): [
        ("a missed update changes nothing", "if not count.tolist()[0]:", "if True:"),
        (
            "contributors grow for layers that nobody used",
            "if f.key in empty and not used.isdisjoint(f.layers)",
            "if f.key in empty",
        ),
    ],
    ("checkpoint/save.py", "tests/deepspeed/test_partly_used.py"): [
        ("a save forgets the last missed update", "kfac.settle()", "pass")
    ],
    ("plan/plan.py", "tests/deepspeed/test_partly_used.py"): [
        ("contributors do not grow", "/ (2 * count)", "/ count")
    ],
    ("assignment/assign.py", "tests/assignment/test_contributors.py"): [
        (
            "the parts of a sequence contribute alone",
            "(parts := self.sequence) > 1",
            "(parts := self.sequence) > 99",
        )
    ],
    ("model/rows.py", "tests/deepspeed/test_contributors.py"): [
        ("rows by a stride begin at the same place in every step", "phase(self.step, stride)", "0")
    ],
    ("checkpoint/load.py", "tests/deepspeed/test_contributors.py"): [
        (
            "a checkpoint's rows are those of any number of ranks",
            "if header.ranks.get(",
            "if False and header.ranks.get(",
        )
    ],
    ("plan/common.py", "tests/plan/test_make_plan.py"): [
        ("own As of experts have no bound", "if taken + more <= bound:", "if True:")
    ],
    ("plan/common.py", "tests/plan/test_make_plan.py tests/model/test_products.py"): [
        (
            "up's own As are not gate's",
            "layer.name: expert.name for stack in others",
            "layer.name: None for stack in others",
        )
    ],
    ("comm/reduce.py", "tests/comm/test_reduction.py tests/comm/test_reducer.py"): [
        ("sums are averaged over ranks", "whole.copy_(total)", "whole.copy_(total / len(parts))")
    ],
    ("step/factors.py", "tests/step/test_factors.py"): [
        (
            "owner keeps the unrounded eigenvectors",
            "update.bases[key].rounded(self.delivery.wire)",
            "update.bases[key]",
        ),
        (
            "messages: of several the last one's eigenbases",
            "bases |= self.delivery.received(arrivals)",
            "bases = self.delivery.received(arrivals)",
        ),
        (
            "messages: the first one alone is sent",
            "for parts in others:",
            "for parts in others[:0]:",
        ),
        (
            "messages: zeros of a failed refresh are a basis",
            "in bases.items() if key in fresh}",
            "in bases.items()}",
        ),
        (
            "messages: of several all are kept",
            "del arrivals  # which keep the last message",
            "vars(self).setdefault('kept', []).append(arrivals)",
        ),
        (
            "messages: the last one is kept beside the next",
            "            del arrivals  # which keep the last message\n",
            "",
        ),
    ],
    ("step/messages.py", "tests/comm/test_delivery.py"): [
        (
            "copies: the owner keeps its unrounded eigenvectors",
            "if world > 1 and any(name in copied",
            "if False and any(name in copied",
        )
    ],
    ("zero/exchange.py", "tests/zero/test_exchange.py"): [
        (
            "what nobody receives is rounded",
            "(self.layout.replicated and param in self.sent)",
            "self.layout.replicated",
        ),
        (
            "replicas keep the unrounded result",
            "(self.layout.replicated and param in self.sent) or ",
            "",
        ),
        (
            "results wait in fp32",
            "_cut_out(flat, span, self.scatter_dtype)",
            "_cut_out(flat, span, torch.float32)",
        ),
        (
            "seam: gradients that are still to be multiplied are read as they are",
            "factor if raw.issuperset(params) else None",
            "None",
        ),
        (
            "seam: a weight and its bias are both multiplied by the factor of one",
            "if not raw.issuperset(params):",
            "if False:",
        ),
        (
            "seam: what is sent raw is multiplied twice",
            "if layout.raw(shards[0]) if is_whole else layout.sends_raw and factor is not None:",
            "if layout.raw(shards[0]):",
        ),
        (
            "seam: raw and multiplied parts of one gradient",
            "layout.raw(shard) == layout.sends_raw:",
            "True:",
        ),
        (
            "seam: results are written undivided",
            "values[index] = times(values[index], self.layout.seam.inverse)",
            "pass",
        ),
        (
            "seam: results are divided where nothing multiplies them",
            "if self.layout.raw(shard):",
            "if True:",
        ),
        (
            "seam: results are computed undivided, in place",
            " or self.layout.raw(shards[0]):\n",
            ":\n",
        ),
        ("results are not scaled", "if scales is not None and self.gradients:", "if False:"),
        ("a frozen parameter moves", "if not parameter.requires_grad:", "if False:"),
        (
            "a frozen parameter moves: in place",
            "if not self.params[layer.name][0].requires_grad:",
            "if False:",
        ),
    ],
    ("zero/exchange.py", _COPIES): [
        (
            "copies keep the unrounded result",
            "(layer.copies > 1 and self.layout.world > 1)",
            "False",
        )
    ],
    ("comm/reduce.py", "tests/comm/test_reduction.py"): [
        (
            "an owner's own rows are not rounded",
            "whole.to(self.layout.dtype) if kind",
            "whole if kind",
        )
    ],
    ("plan/common.py", "tests/plan/test_plan.py"): [
        (
            "copies have their A from a shard's plan",
            "layer.G.block == 0, layer.copies)",
            "layer.G.block == 0)",
        ),
        (
            "a common A has the rows of one expert",
            "return tuple(name for name in factor.layers if layers[name].weight == first.weight)",
            "return (first.name,)",
        ),
    ],
    ("zero/stages.py", "tests/deepspeed/test_unused.py"): [
        ("stage 3: the last gradient stays", "self._chunks.pop().zero_()", "self._chunks.pop()")
    ],
    ("zero/stages.py", _ACCESS): [
        (
            "seam: DeepSpeed's dict of gradients replaced",
            "self.optimizer.averaged_gradients.clear()",
            "self.optimizer.averaged_gradients = {}",
        ),
        (
            "seam: the host's gradients do not wait",
            "bool(optimizer.norm_for_param_grads) or deepspeed_versions",
            "deepspeed_versions",
        ),
    ],
    ("zero/deepspeed_versions.py", _ACCESS): [
        (
            "seam: stage 3's gradients do not wait",
            "return optimizer.micro_step_id > 0 or",
            "return",
        ),
        (
            "seam: states of the first group alone",
            "optimizer._hp_optimizer_states_linked = False",
            "pass",
        ),
    ],
    ("directions/kfac_adamw/rule.py", _ACCESS): [
        ("seam: a rank waits for one that raised", "layout.guard_states(no_state)", "pass")
    ],
    ("directions/kfac_adamw/user_optimizer.py", "tests/deepspeed/test_optimizer_object.py"): [
        (
            "user's groups: a scheduler sees those that are stepped",
            'scheduler(getattr(optimizer, "users", optimizer))',
            "scheduler(optimizer)",
        ),
        (
            "KFACAdamW: the object's group changes itself alone",
            "dict.__setitem__(part, key, value)",
            "dict.__setitem__(self, key, value)",
        ),
    ],
    ("directions/table.py", "tests/deepspeed/test_optimizer_object.py"): [
        (
            "user's groups: a recipe's optimizer is not looked at",
            "if rule.given(optimizer):",
            "if False:",
        )
    ],
    ("comm/message.py", "tests/deepspeed/test_lifecycle.py"): [
        (
            "own group: a group for each engine",
            "None in numbers[members] or len(numbers[members]) > 1",
            "True",
        ),
        ("own group: the first that closes ends it", "if not self.channels:", "if True:"),
    ],
    ("engine/batch_ramp.py", _RAMP): [
        ("ramp: a rate set by hand is written back", "elif new != ours:", "elif False:"),
        (
            "ramp: in the middle of a step",
            "(self.engine.micro_steps + 1) % (batch // self._micro_batch) == 0",
            "True",
        ),
        ("ramp: samples of the step that ends", "self.engine.global_samples -= self.batch", "pass"),
        ("ramp: schedules by steps", "1 if args or named else self.batch // self.first", "1"),
        (
            "ramp: rate by the batch",
            "math.sqrt(self.batch / self.first)",
            "self.batch / self.first",
        ),
        (
            "ramp: place in DeepSpeed's count",
            'ramp["micro"] - ramp["micro"] % self.engine.gradient_accumulation_steps()',
            "0",
        ),
    ],
    ("directions/kfac_adamw/rule.py", "tests/deepspeed/test_optimizer_object.py"): [
        (
            "groups: a bias's own eps is ignored",
            'for key in ("betas", "eps"):',
            'for key in ("betas",):',
        )
    ],
    ("checkpoint/load.py", "tests/deepspeed/test_optimizer_object.py"): [
        (
            "schedule: rates of other groups are taken",
            "_check_schedule(engine.lr_scheduler, tag_directory)",
            "pass",
        )
    ],
    ("zero/layout.py", _HOOKS): [
        (
            "hooks: DeepSpeed's are the user's",
            'not in ("deepspeed", "ds_kfac")',
            'not in ("ds_kfac",)',
        )
    ],
    ("engine/attachment.py", _HOOKS): [
        (
            "hooks: what is trained later is not told",
            "if id(model.get_parameter(name)) in added]:",
            "if False]:",
        )
    ],
    ("update/groups.py", "tests/update/test_stacking.py"): [
        (
            "chunks: everything at once",
            "room = max(chunk_budget(",
            "room = (1 << 62) + max(chunk_budget(",
        ),
        (
            "batch: a view of matrices at unequal distances",
            "or starts != [starts[0] + index * apart for index in range(len(parts))]",
            "",
        ),
    ],
    ("curvature/methods.py", "tests/comm/test_delivery.py"): [
        (
            "eigenvalues rounded on the wire",
            'attrgetter("values"), False)',
            'attrgetter("values"), True)',
        )
    ],
    ("directions/kfac_gradient.py", "tests/directions/test_kfac_gradient.py"): [
        ("kl-clip: lr not squared", "dots.sum() * rates[0] ** 2", "dots.sum() * rates[0]"),
        (
            "kl-clip: rate of a part not squared",
            "torch.stack(some).sum() * rate**2",
            "torch.stack(some).sum() * rate",
        ),
        (
            "still: a direction that is not finite is stepped along",
            "V.masked_fill_(zero, 0.0)",
            "V",
        ),
        ("still: a layer is in kl-clip's sum", "dot = dot.masked_fill(still, 0.0)", "pass"),
    ],
    ("directions/kfac_gradient.py", f"{_TRAPS}::test_kl_clip_respects_a_learning_rate_schedule"): [
        (
            "kl-clip: by the current rate",
            "[self.peak_lr[group] for group in",
            '[context.groups[group]["lr"] for group in',
        )
    ],
    (
        "directions/kfac_gradient.py",
        "tests/directions/test_kfac_gradient.py tests/directions/test_direction_scales.py",
    ): [
        (
            "kl-clip on layers that are not prepared",
            "torch.where(flags, nu, torch.ones_like(nu))",
            "nu.expand(len(flags))",
        ),
        (
            "EKFAC: one loss term",
            "else repeated(terms[own], group.maps)",
            "else terms.new_ones(group.n)",
        ),
    ],
    (
        "zero/registry.py",
        "tests/deepspeed/test_autoep.py::test_a_checkpoint_holds_the_experts_of_every_rank",
    ): [("AutoEP: names by a rank's own numbers", "rank * len(p)", "0 * len(p)")],
    (
        "directions/kfac_adamw/user_optimizer.py",
        "tests/deepspeed/test_autoep.py::test_experts_match_one_process",
    ): [
        (
            "AutoEP: KFACAdamW's groups mix experts and others",
            "experts_apart([checked_group(group) for group in parts])",
            "[checked_group(group) for group in parts]",
        )
    ],
    (
        "checkpoint/load.py",
        "tests/deepspeed/test_autoep.py::test_an_A_that_experts_share_continues_at_another_ep_size",
    ): [
        (
            "AutoEP: a shared A is lost at another ep_size",
            "saved = _of_stack(saved, header.factors)",
            "pass",
        )
    ],
    ("directions/kfac_adamw/optimizer.py", "tests/directions/test_optimizer_step.py"): [
        ("KFACAdamW: decay with the wrong sign", "1 - amount, torch", "1 + amount, torch"),
        ("KFACAdamW: unused layers decay", "used > 0", "used >= 0"),
        ("KFACAdamW: step hooks run twice", "without_step_hooks(super().step)", "super().step"),
        (
            "KFACAdamW: a bf16 master's rate is rounded",
            " and all(parameter.dtype is torch.float32 for parameter in parameters)",
            "",
        ),
        (
            "KFACAdamW: what was used is moved for every group",
            "self._used_by_device[device] = self._used.to(device)",
            "return self._used.to(device)",
        ),
    ],
    ("directions/kfac_adamw/direction.py", "tests/directions/test_direction_scales.py"): [
        (
            "KFACAdamW: betas of the wrong group",
            "context.groups[index] for index in self.groups_in_use",
            "context.groups[-1] for index in self.groups_in_use",
        ),
        (
            "decay: the optimizer is not told what was used",
            "len(flags)].copy_(flags)",
            "len(flags)]",
        ),
        ("decay: what was frozen later decays", "if self._frozen() != self.frozen:", "if False:"),
        ("decay: of frozen parameters", " if parameter.requires_grad else ()", ""),
        (
            "decay: the slices of another domain are lost",
            "[part for part in parts if part[2] not in own]",
            "[]",
        ),
    ],
    (
        "directions/kfac_adamw/direction.py",
        "tests/deepspeed/test_unused.py tests/deepspeed/test_traps.py::"
        "test_our_own_nan_is_never_applied",
    ): [("decay: slices of other places", "part = shard.offset,", "part = 0,")],
    (
        "directions/kfac_adamw/direction.py",
        f"{_KFAC_ADAMW}::test_what_has_no_rate_stands_still_and_does_not_decay",
    ): [("KFACAdamW: layers without a rate decay", " & self.moves[step.own]", "")],
    (
        "directions/kfac_adamw/user_optimizer.py",
        "tests/deepspeed/test_unused.py::test_what_is_unfrozen_later_is_trained_where_adamw_trains_it",
    ): [
        (
            "KFACAdamW: a group that is frozen at first is dropped",
            "frozen=not (stage or any(wrapped))",
            "frozen=False",
        )
    ],
    ("directions/kfac_adamw/optimizer.py", "tests/config/test_kfac.py"): [
        ("KFACAdamW: betas stay whole numbers", "tuple(map(float, pair))", "tuple(pair)")
    ],
    ("step/preconditioner.py", "tests/directions/test_direction_scales.py"): [
        (
            "terms of a batch without rows",
            "torch.where(terms > 0, terms, group.terms[index], out=group.terms[index])",
            "group.terms[index].copy_(terms)",
        )
    ],
    (
        "step/job.py",
        "tests/zero/test_seam.py::test_a_skipped_step_drops_what_its_hooks_have_seen",
    ): [
        (
            "a skipped step's sums are kept",
            "            kfac.resume()\n",
            "            applied and kfac.resume()\n",
        )
    ],
    ("zero/seam.py", "tests/zero/test_seam.py"): [
        (
            "seam: a skipped step counts as applied",
            "self._steps.end(applied=self._state is State.STEPPED)",
            "self._steps.end(applied=True)",
        ),
        (
            "seam: each group's step is a step",
            "if self._state is State.DECIDING:",
            "if True:",
        ),
        (
            "seam: hooks that torch runs twice are two steps",
            "if self._depth == 1 and self._has_gradients():",
            "if self._has_gradients():",
        ),
        (
            "seam: a step without gradients is a step",
            "return any(p.grad is not None for group",
            "return any(True for group",
        ),
        ("seam: groups stay apart after an error", 'group["params"] = own', "pass"),
        ("seam: no group is as it will be applied", "        self.prepared += 1\n", ""),
        (
            "seam: what was interrupted has run",
            "        self._depth = 0\n        self._leave_step()\n",
            "        self._depth = 0\n",
        ),
    ],
    ("zero/stages.py", "tests/zero/test_seam.py"): [
        (
            "seam: a later group is as it will be applied",
            "shard.group >= self.seam.prepared",
            "shard.group > self.seam.prepared",
        ),
        (
            "seam: a later group's gradient is where the first one's is",
            "if self.offloads or shard.group < self.seam.prepared:",
            "if True:",
        ),
        (
            "seam: results for a later group are rounded to fp16",
            "if entries[place].dtype is torch.float16:",
            "if False:",
        ),
    ],
    ("zero/self_test.py", "tests/zero/test_seam.py"): [
        (
            "self-test: of the first group alone",
            "in enumerate(zip(before, after, strict=False)):",
            "in [*enumerate(zip(before, after, strict=False))][:1]:",
        ),
        (
            "self-test: nobody looks at what arrives",
            "errors.extend(test.exchanged(channel))",
            "test.exchanged(channel)",
        ),
    ],
    ("zero/deepspeed_versions.py", "tests/zero/test_seam.py::test_the_self_test_leaves_no_trace"): [
        ("self-test: DeepSpeed's numbers stay", "            now.update(before)\n", ""),
        ("self-test: parameters stay gathered", "gathered[0].partition(gathered)", "pass"),
    ],
    (
        "zero/stages.py",
        f"{_TRAPS}::test_an_offloaded_gradient_that_was_not_renewed_is_not_preconditioned_again",
    ): [
        (
            "offload: a result is preconditioned again",
            "                self._gradient(shard).zero_()\n",
            "                pass\n",
        )
    ],
    ("step/totals.py", "tests/deepspeed/test_unused.py"): [
        (
            "flags: in the order of the groups",
            "(0, self._places, outcome.flags)",
            "(0, self._places.sort().values, outcome.flags)",
        ),
        ("flags: all are true", "flags > 0 if self.layers", "flags >= 0 if self.layers"),
    ],
    ("zero/layout.py", "tests/zero/test_deepspeed_versions.py"): [
        ("stage 0 in bf16 adds up all steps", "self.optimizer.zero_grad()", "pass")
    ],
    ("directions/kfac_adamw/group_step.py", "tests/directions/test_adam_choice.py"): [
        ("a shard's step has a whole layer's size", " / math.prod(layer.cut)", "")
    ],
    ("update/recorded.py", "tests/update/test_recorded.py"): [
        (
            "recorded: settings are no part of the key",
            "[*map(id, places)], values",
            "[*map(id, places)]",
        ),
        (
            "recorded: another object's tensors are taken for the same",
            "[*map(id, places)], values",
            "values",
        ),
        ("recorded: what was recorded counts as a run", "        self._replay()\n", ""),
    ],
    ("directions/step_tensors.py", "tests/update/test_recorded.py"): [
        (
            "recorded: gradients of the step that was recorded",
            "torch._foreach_copy_([*tensors.gradients.values()], [gradients.pop(name) for name in "
            "names])",
            "pass",
        ),
        ("recorded: loss terms of the step that was recorded", "places[name].copy_(value)", "pass"),
        ("recorded: damping of the step that was recorded", "places[name].fill_(value)", "pass"),
    ],
    ("directions/step_tensors.py", "tests/directions/test_direction_scales.py"): [
        (
            "recorded: a first basis is not used",
            "read = [group.rotation for group in self.groups]",
            "read = []",
        )
    ],
    ("step/proving.py", "tests/deepspeed/test_interruptions.py"): [
        (
            "rows are judged by gradients of dropped ones",
            "        if after_error:\n            for layer",
            "        if False:\n            for layer",
        )
    ],
    (
        "zero/exchange.py",
        "tests/deepspeed/test_optimizer_programs.py::"
        "test_a_layer_one_of_whose_gradients_is_taken_away_stands_still",
    ): [
        (
            "a layer without one of its gradients is stepped in part",
            "matrix_OI = torch.zeros_like(matrix_OI)",
            "pass",
        )
    ],
    ("engine/attachment.py", "tests/deepspeed/test_interruptions.py"): [
        ("gradients stay that a step has overwritten", "kfac.layout.clear()", "pass"),
        (
            "a step that raised is said each time",
            "if begun and BROKEN not in self._warned:",
            "if begun:",
        ),
        (
            "rows of a backward that raised stay",
            "stack.push(lambda kind, *_: self.job.drop_step() if kind is not None else None)",
            "pass",
        ),
        ("products are watched after Ctrl-C", "stack.callback(capture.leave)", "pass"),
    ],
    ("zero/exchange.py", "tests/deepspeed/test_memory.py"): [
        (
            "results are kept beside their message",
            'free it."""\n        self._outbox.clear()',
            'free it."""\n        pass',
        ),
        (
            "views of gradients outlive their step",
            "        self.gradients = {}  # DeepSpeed's step frees what they are of\n",
            "",
        ),
    ],
    ("directions/step_tensors.py", "tests/deepspeed/test_memory.py"): [
        (
            "gradients are kept beside results",
            "parts = [self.gradients.pop(name)",
            "parts = [self.gradients[name]",
        )
    ],
    ("step/preconditioner.py", "tests/deepspeed/test_memory.py"): [
        ("bases are kept where they came", "update.bases.clear()", "pass"),
        ("batch sums are kept beside new bases", "sums.clear()  # frees", "pass  # frees"),
    ],
    ("estimate/estimates.py", "tests/deepspeed/test_memory.py"): [
        ("estimate: products do not count", "max(taken, left + nbytes, put)", "max(taken, put)")
    ],
    ("estimate/estimates.py", "tests/estimate/test_mem_needs.py"): [
        ("estimate: results that wait do not count", "done + max(taken,", "max(taken,")
    ],
    ("model/blocks.py", "tests/model/test_blocks.py"): [
        (
            "blocks: all heads have keys of their own",
            "return heads * width, shared * width, shared * width",
            "return (rows // 3,) * 3",
        ),
        ("blocks: gates that take turns are halves", "in IN_TURN:", "in ():"),
        (
            "blocks: any Wi has a gate",
            "(rows // 2,) * 2 if is_gated else ()",
            "(rows // 2,) * 2",
        ),
        ("blocks: what was guessed is not said", "guessed = BY_NAME if fits else ONE_MAP", "pass"),
        ("blocks: what is known is one map", "blocks=sizes if fits else ()", "blocks=()"),
    ],
    ("directions/kfac_adamw/group_step.py", "tests/model/test_blocks.py"): [
        (
            "blocks: in turn is one after the other",
            "x_OI.unflatten(-2, (-1, sum(sizes)))",
            "x_OI.unflatten(-2, (1, -1))",
        )
    ],
    ("directions/kfac_adamw/group_step.py", _FEATURES): [
        ("blocks: rows of what is rotated", "self.orthogonal and bool(layer.blocks)", "False"),
        (
            "blocks: a block has the size of the whole",
            "SIZE * step_norm(layer, rows)",
            "SIZE * step_norm(layer)",
        ),
    ],
    (
        "directions/kfac_adamw/optimizer.py",
        f"{_KFAC_ADAMW}::test_matrices_in_no_layer_and_their_biases_have_lr_and_all_else_adam_lr",
    ): [
        (
            "rates: matrices in no layer at adam_lr",
            "1.0 if group.get(MATRIX) else self.adam_ratio",
            "self.adam_ratio",
        )
    ],
    ("engine/explain.py", "tests/deepspeed/test_explain.py"): [
        (
            "explain: a failed refresh is not told",
            "if outcome == FAILED:\n                text",
            "if False:\n                text",
        ),
        ("explain: another batch's numbers", "numbers[:, column]", "numbers[:, 0]"),
    ],
    ("directions/direction.py", "tests/deepspeed/test_toys.py"): [
        ("rules: a layer without a basis is stepped", "if basis is not None:", "if True:")
    ],
    ("directions/direction.py", "tests/directions/test_layer_by_layer.py"): [
        (
            "rules: a gradient that is not finite is stepped along",
            "[torch.where(moves, result, 0.0)]",
            "[result]",
        ),
        (
            "rules: a gradient that is not finite goes into moments",
            "torch.where(moves, now, old, out=old)",
            "old.copy_(now)",
        ),
        (
            "rules: the result alone is looked at",
            "for x in (gradient, result)]",
            "for x in (result,)]",
        ),
        (
            "rules: a layer that stands still is not counted",
            "outcome.replaced + (~moves).float()",
            "outcome.replaced + 0.0",
        ),
    ],
    ("directions/base.py", "tests/deepspeed/test_toys.py tests/config/test_kfac.py"): [
        (
            "rules: a basis that a method does not keep is not missed",
            "if self.needs_basis and not METHODS[name].rotates:",
            "if False:",
        )
    ],
    ("update/rotation.py", "tests/directions/test_layer_by_layer.py"): [
        (
            "rules: null spaces of one side alone",
            "x_OI = x_OI * range_mask(side.vectors",
            "return x_OI * range_mask(side.vectors",
        )
    ],
    (
        "metrics.py",
        f"{_TRAPS}::test_layers_without_data_at_a_refresh_get_their_basis_as_soon_as_they_have",
    ): [
        (
            "summary: a state is summed up",
            '"unpreconditioned_layers": False',
            '"unpreconditioned_layers": True',
        )
    ],
    ("estimate/subject.py", "tests/estimate/test_models.py"): [
        (
            "estimate: a token takes every expert",
            "= output.numel() / outputs / count",
            "= output.numel() / outputs",
        )
    ],
    ("model/blocks.py", "tests/model/test_cut.py"): [
        (
            "a head's parts have an A each",
            'shares = f"{name}.0" if index else None',
            "shares = None",
        )
    ],
    ("estimate/estimates.py", "tests/deepspeed/test_estimate.py"): [
        (
            "estimate: counts and elements padded together",
            "(-(-matrix // ALIGNMENT) * ALIGNMENT for _, matrix in message)",
            "(-(-matrix // ALIGNMENT) * ALIGNMENT for matrix in [sum(matrix for _, matrix in "
            "message)])",
        )
    ],
    ("config/values.py", "tests/config/test_numbers.py"): [
        ("config: any number will do", "and not abs(value) <= LARGEST:", "and False:"),
        (
            "config: in a schedule any number will do",
            "[Annotated[number, BeforeValidator(fits)]]",
            "[number]",
        ),
    ],
    ("checkpoint/load.py", _SAVED): [
        (
            "resume: peak rate forgotten",
            '"peak_lr": {int(group): lr for group, lr in header.peak_lr.items()},',
            '"peak_lr": {},',
        ),
        (
            "resume: history forgotten",
            "content.updates, last, before)",
            "content.updates, None, None)",
        ),
        ("resume: steps forgotten", '"steps": header.steps,', '"steps": 0,'),
        (
            "resume: terms forgotten",
            "LayerState(content.terms.to(kfac.device),",
            "LayerState(torch.ones((), device=kfac.device),",
        ),
        (
            "resume: corrected eigenvalues forgotten",
            "if header.moments != kfac.moments.NAME:",
            "if True:",
        ),
    ],
    ("factors/fitting.py", _FIT): [
        (
            "factors: sums in place of means",
            "packed = (sums.pop(key) / count.clamp(min=1)).float()",
            "packed = sums.pop(key).float()",
        )
    ],
    ("factors/corrected.py", _FIT): [
        (
            "factors: sequences' squares of no sum",
            "(g_TO.mT @ x_TI).square_()",
            "g_TO.square().mT @ x_TI.square()",
        )
    ],
    ("factors/fitting.py", "tests/factors/test_rows.py"): [
        ("factors: rows of batches with a token alone", "counts[key].fill_(rows)", "pass")
    ],
    ("factors/corrected.py", "tests/factors/test_rows.py"): [
        ("factors: positions for sequences", "if isinstance(call.module, ATTENTION):", "if False:")
    ],
    ("factors/passes.py", _FIT): [
        (
            "factors: a gradient that is not finite",
            "if sums and not torch.stack(sums).isfinite().all():",
            "if False:",
        )
    ],
    ("factors/fitting.py", "tests/factors/test_files.py"): [
        ("factors: a folder that cannot be written", "write_tensors(self.out / file, {})", "pass")
    ],
    ("model/capture.py", _FIT): [
        ("factors: padding without gradients", "every if call.mask is None else call.mask", "every")
    ],
    (
        "engine/preflight.py",
        "tests/deepspeed/test_optimizer_object.py::test_an_object_that_is_not_passed_on_is_an_error",
    ): [("optimizer object: dropped", "if rule.optimizer_type is None:", "if False:")],
    (
        "directions/kfac_adamw/user_optimizer.py",
        "tests/deepspeed/test_optimizer_object.py::test_an_object_that_is_not_passed_on_is_an_error",
    ): [("optimizer object: taken ones count", " if not group.taken[1]]", "]")],
    (
        "engine/entry.py",
        "tests/integrations/test_asked_for.py::test_a_script_that_sets_the_variable_itself_is_told_of",
    ): [
        (
            "enabled: a variable that was set later",
            "wanted = ds_kfac_startup.asked() if _enabled is None else _enabled",
            "wanted = bool(_enabled)",
        )
    ],
    (
        "engine/entry.py",
        "tests/deepspeed/test_not_attached.py::test_a_block_without_effect_is_said_once",
    ): [
        (
            "initialize: no K-FAC and no word",
            "if not (without_optimizer(engine) or (enabled() and _unattached is None)):",
            "if False:",
        )
    ],
    ("directions/kfac_adamw/facts.py", "tests/directions/test_adam_choice.py"): [
        ("report: the identity whitens", " and layer.A.block > 0", "")
    ],
    ("factors/convert.py", "tests/factors/test_convert.py"): [
        ("factors: the 1 of a bias among the inputs", "A[:-1, :-1]", "A"),
        (
            "factors: directions that explain least",
            "vectors.mT.flip(0)[:most]",
            "vectors.mT[:most]",
        ),
    ],
    ("factors/export.py", "tests/factors/test_export.py"): [
        ("factors: those of no step", "and float(factor.updates) > 0", "")
    ],
    ("engine/batch_ramp.py", "tests/deepspeed/test_pipeline.py"): [
        ("ramp: loss of a pipeline", "self.engine.total_loss *= 2", "pass")
    ],
    # the rule of rows
    ("model/masks.py", _RULE): [
        ("rule: rows [T, N] are not masked", "fitted = mask.T", "return None"),
        (
            "rule: flattened rows beside others are masked",
            "(examples * positions,) and not is_2d:",
            "(examples * positions,):",
        ),
        ("rule: flattened rows are not masked", "return mask.reshape(-1)", "return None"),
        (
            "rule: one mask of several leaves a row out",
            "if union is None else union | fitted",
            "if union is None else union & fitted",
        ),
        (
            "rule: an additive mask leaves rows out",
            "yield (mask != 0) | ~binary",
            "yield mask != 0",
        ),
        ("rule: a mask by its whole name", "str(name).endswith(NAME)", "str(name) == NAME"),
        ("rule: a mapping has no masks", "named += mapping.items()", "pass"),
    ],
    ("model/rows.py", _RULE): [
        (
            "rule: a row without a gradient is none",
            "return with_gradient | (others & with_gradient.any())",
            "return with_gradient",
        ),
        ("rule: a call without a gradient has rows", "(others & with_gradient.any())", "others"),
        (
            "rule: a mask excludes rows with a gradient",
            "return with_gradient | (others",
            "return (others",
        ),
        ("rule: masks exclude nothing", "others = others & mask", "pass"),
        (
            "rule: an empty place is a row",
            "others = is_nonzero(x).reshape(with_gradient.shape)",
            "others = torch.ones_like(with_gradient)",
        ),
    ],
    ("model/passes.py", _RULE): [
        (
            "rule: rows of the layer farthest from the loss",
            "torch.where(is_found, total, rows)",
            "rows",
        ),
        (
            "rule: of nearest rows that a mask leaves out, none has a gradient",
            "(with_gradient & ~mask).sum()",
            "0",
        ),
        (
            "rule: a forward's rows count twice",
            "for forward in self.forwards)\n",
            "for forward in list(self.forwards) * 2)\n",
        ),
    ],
    ("model/capture.py", _RULE): [
        ("rule: G without R_p", "batch.sum_P.mul_(rows)", "pass"),
        ("rule: K is one", "counts[PASSES].add_(self.passes)", "counts[PASSES].add_(1)"),
        (
            "rule: a head without curvature is not nearest",
            "if module not in hooked and is_linear_map(module):",
            "if False:",
        ),
        (
            "rule: a frozen head is not nearest",
            "            self._other_called(layer.weight, module, inputs, output)",
            "            pass",
        ),
        (
            "own: autograd.grad is the loss's",
            "if not weight.requires_grad or not _runs(get_gradient_edge(weight).node):",
            "if not weight.requires_grad:",
        ),
        (
            "own: no backward inside of a forward",
            "return self._forward_runs or (forward.detached and not self._announced)",
            "return forward.detached and not self._announced",
        ),
    ],
    ("model/capture.py", "tests/model/test_capture.py"): [
        (
            "modules of one weight: the first is heard",
            "(layer.module, *layer.also)",
            "(layer.module,)",
        ),
        (
            "another engine's backward counts",
            "            return self in self._backwards\n",
            "            return True\n",
        ),
        ("a copy of the model counts", "if module is ours and not", "if not"),
        ("inputs stay until the graph goes", "call.kept = None  # autograd", "pass  # autograd"),
        (
            "inputs go though the graph stays",
            "if not torch._C._autograd._get_current_graph_task_keep_graph():",
            "if True:",
        ),
        (
            "the end of a recomputation is an error",
            "except _StopRecomputationError:",
            "except ZeroDivisionError:",
        ),
        (
            "a recomputation is of any forward",
            "            if self._running is not None:\n                return self._running",
            "            if False:\n                return self._running",
        ),
        (
            "earlier steps' forwards are not recomputed",
            "(self.active or self._running is not None)",
            "self.active",
        ),
        (
            "rows of earlier steps count",
            "return self.active and forward.step == self.step",
            "return self.active",
        ),
    ],
    ("model/calls.py", "tests/model/test_capture.py"): [
        ("autocast: the input itself is kept", "x = x.to(torch.get_autocast_dtype(device))", "pass")
    ],
    ("model/rows.py", "tests/model/test_capture.py"): [
        (
            "loss scale stays in G",
            "rows = rows.float() if is_unscaled else rows.float() / scale",
            "rows = rows.float()",
        ),
        (
            "scale of 16-bit rows not squared",
            "factor = factor / scale**2",
            "factor = factor / scale",
        ),
    ],
    ("model/rows.py", "tests/model/test_rows.py"): [
        (
            "reduce: mean over padding too",
            "torch.where(kept_NT1, x_NTD.float(), 0.0).sum(dim=1)",
            "x_NTD.float().sum(dim=1)",
        ),
        (
            "inputs of some outputs count as those of all",
            "scale: Tensor | float = sample.stride * call.share",
            "scale: Tensor | float = sample.stride",
        ),
        (
            "a gradient's row by a stride stands for itself alone",
            "factor: Tensor | float = float(sample.stride)",
            "factor: Tensor | float = 1.0",
        ),
        ("rows by a stride begin at the same place in every step", "phase(self.step, stride)", "0"),
        (
            "pairs: rows that do not count have inputs",
            "return torch.where(kept.reshape(*x_NTI.shape[:2], 1), x_NTI, 0.0)",
            "return x_NTI",
        ),
    ],
    ("model/capture.py", "tests/model/test_calls.py"): [
        (
            "a layer that failed saves no more",
            "if any(call.layer.name in rows.forward.saved for call in calls):",
            "if any(call.layer.name not in self.failed for call in calls):",
        ),
        (
            "a product's input is unpacked for each matrix",
            "else node_of_x.saved_tensors[0]",
            "else [node_of_x.saved_tensors[0] for _ in calls][0]",
        ),
        (
            "another thread's forward is the model's",
            "is_others = self._forward_runs and self._thread !=",
            "is_others = False and self._thread !=",
        ),
        (
            "reduce: examples are not compared",
            "self.current.check_examples(call.rows, gradient)",
            "pass",
        ),
    ],
    ("model/passes.py", "tests/model/test_calls.py"): [
        (
            "reduce: a head in tiles is another batch",
            "return not sizes or examples in (*sizes, sum(sizes))",
            "return not sizes or examples == sizes[0]",
        )
    ],
    ("model/masks.py", "tests/model/test_calls.py"): [
        (
            "reduce: a row of a flattened batch is none",
            "mask.flatten(1).any(dim=1) if mask.ndim > 1 else mask",
            "mask.flatten(1).any(dim=1)",
        )
    ],
    ("model/calls.py", "tests/model/test_products.py"): [
        (
            "attention: keys count as three times their outputs",
            "(self.columns.stop - self.columns.start) / self.shape[-1]",
            "1.0",
        )
    ],
    ("model/calls.py", _PROOF): [
        (
            "proof: a step of rows",
            "return gradient.reshape(self.shape)",
            "return gradient.reshape(self.shape).flip(0)",
        )
    ],
    ("model/shared.py", _PROOF): [
        (
            "parts of a layer give its rows each",
            "return arrived if layer.shares is None else None",
            "return arrived",
        )
    ],
    ("model/shared.py", "tests/model/test_shared_inputs.py"): [
        (
            "shared inputs: every layer gives rows",
            "if gradients >= self._calls[place]:",
            "if True:",
        ),
        ("shared inputs: rows that wait are lost", "return waiting\n", "return []\n"),
        (
            "shared inputs: gradients of zero are as any",
            "True if seen.alive is None else next(values)",
            "True",
        ),
        ("shared inputs: version ignored", "x.stride(), x._version", "x.stride(), 0"),
    ],
    ("model/convolutions.py", "tests/model/test_capture_images.py"): [
        (
            "convolution: no batch dimension, rows for channels",
            "if x.ndim > self.dims + 1 else",
            "if x.ndim > 0 else",
        )
    ],
    ("model/proof.py", "tests/step/test_proving.py"): [
        (
            "proof: whatever it finds fits",
            "return self.ratio <= 1 or self.left_out > 0",
            "return True",
        )
    ],
    ("step/proving.py", "tests/step/test_unproven.py"): [
        ("proof: layers of one A are not asked", "if wrong is not None:", "if False:")
    ],
}
"""(File, tests) -> name, old text, new text of each mutant."""
MUTANTS = tuple(
    Mutant(name, file, old, new, tests)
    for (file, tests), rows in _ROWS.items()
    for name, old, new in rows
)
