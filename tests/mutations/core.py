"""Bugs in the kernels, the core and the model: the ones that NSA implementations really have."""

from tests.mutations import Mutation

KERNELS = ("tests/kernels/test_reference.py", "tests/kernels/test_backends.py")
BACKENDS = ("tests/kernels/test_backends.py",)
CHUNKING = ("tests/kernels/test_chunking.py",)
AUTOCAST = ("tests/kernels/test_autocast.py",)
LSE = ("tests/kernels/test_lse_gradients.py",)
ORACLE = ("tests/core/test_against_oracle.py",)
CACHE = ("tests/core/test_kv_cache.py",)
ATTENTION = ("tests/core/test_attention.py", *ORACLE)
READS = ("tests/core/test_probe.py",)
MODEL = ("tests/model/test_transformer.py", "tests/model/test_loss.py", "tests/model/test_block.py")

REFERENCE, OPS, PRECISION = "nsa/kernels/reference.py", "nsa/kernels/ops.py", "nsa/kernels/precision.py"
SHARED, SELECTED, SELECTION, CHUNK = (
    f"nsa/kernels/portable/{name}.py" for name in ("range_attention", "selected", "selection", "chunk")
)
LAYOUT, CACHE_PY, NSA = "nsa/core/document_layout.py", "nsa/core/kv_cache.py", "nsa/core/nsa_attention.py"
SLOTS, FUNCTIONAL = "nsa/core/cache_slots.py", "nsa/core/functional.py"

MUTATIONS = [
    # kernels/reference.py
    Mutation("reference: window of w + 1 tokens", REFERENCE, "(age_BST < geometry.w)", "(age_BST <= geometry.w)", KERNELS),
    Mutation("reference: query does not see itself", REFERENCE, "(age_BST >= 0) &", "(age_BST > 0) &", KERNELS),
    Mutation("reference: compressed block visible one token early", REFERENCE, "at_BSC * geometry.d + geometry.l - 1 <=",
             "at_BSC * geometry.d + geometry.l - 2 <=", KERNELS),
    Mutation("reference: compressed block visible by its first token", REFERENCE, "at_BSC * geometry.d + geometry.l - 1 <=",
             "at_BSC * geometry.d <=", KERNELS),
    Mutation("reference: overlap one stride off", REFERENCE, "torch.arange(n_compressed)[:, None] * g.d",
             "(torch.arange(n_compressed)[:, None] + 1) * g.d", KERNELS),
    Mutation("reference: overlap not weighted", REFERENCE, "shared_CJ.clamp(min=0) // g.d", "(shared_CJ > 0).long()",
             KERNELS),
    Mutation("reference: first block not forced", REFERENCE, "(j_J == 0) | (j_J == own_BS1) | (j_J == own_BS1 - 1)",
             "(j_J == own_BS1) | (j_J == own_BS1 - 1)", KERNELS),
    Mutation("reference: one local block instead of two", REFERENCE, "(j_J == own_BS1) | (j_J == own_BS1 - 1)",
             "(j_J == own_BS1)", KERNELS),
    Mutation("reference: block after the query may be chosen", REFERENCE, "(j_J > own_BS1)", "(j_J > own_BS1 + 1)",
             KERNELS),
    Mutation("reference: invalid block scores 0", REFERENCE, "(j_J > own_BS1)[:, :, None], -torch.inf)",
             "(j_J > own_BS1)[:, :, None], 0.0)", KERNELS),
    Mutation("reference: ties to the higher index", REFERENCE, "score_BSGJ.sort(dim=-1, descending=True, stable=True)",
             "score_BSGJ.flip(-1).sort(dim=-1, descending=True, stable=True)", KERNELS),
    Mutation("reference: importance of one head only", REFERENCE, "p_BSGRC.sum(3)", "p_BSGRC[:, :, :, 0]", KERNELS),
    Mutation("reference: selected block read past the query", REFERENCE, "(at_BST >= 0) & (at_BST <= pos_BS[..., None])",
             "(at_BST >= 0)", KERNELS),
    Mutation("reference: empty row is an average", REFERENCE, ".exp() * visible\n", ".exp()\n", KERNELS),
    # kernels/portable
    Mutation("portable: window of w − 1 tokens", SHARED, "(pos_BS - geometry.w + 1).clamp(min=0)",
             "(pos_BS - geometry.w + 2).clamp(min=0)", BACKENDS),
    Mutation("portable: mask from the wrong end", SHARED, "(at_U >= hi_Bc[..., None])", "(at_U > hi_Bc[..., None])",
             BACKENDS),
    Mutation("portable: future leaks by one compressed block", SHARED,
             "(first_BS + n_complete_BS).clamp(0, n_keys)", "(first_BS + n_complete_BS + 1).clamp(0, n_keys)", BACKENDS),
    Mutation("portable: dK of the last chunk only", SHARED, "dk_BTGK[:, lo:hi] += dk.transpose(1, 2)",
             "dk_BTGK[:, lo:hi] = dk.transpose(1, 2)", (*BACKENDS, *CHUNKING)),
    Mutation("portable: overlap one stride off", SELECTION, "torch.arange(1 - l // d, l_sel // d) * d",
             "torch.arange(2 - l // d, l_sel // d + 1) * d", BACKENDS),
    Mutation("portable: ties to the higher index", SELECTION, "<< 32 | (n_blocks - j_J)", "<< 32 | j_J", BACKENDS),
    Mutation("portable: documents share compressed blocks in selection", SELECTION,
             "mass_BcGU = _rebase(mass_BcGU, first - lo)", "mass_BcGU = mass_BcGU + 0", BACKENDS),
    Mutation("portable: shared load shows tokens after the query", SELECTED,
             "hidden_BGcU |= token_BGU[:, :, None] > pos_Bc[:, None, :, None]", "pass", BACKENDS),
    Mutation("portable: shared load shows blocks others chose", SELECTED, "~chose_BGcJ.repeat_interleave(l_sel, -1)",
             "torch.zeros_like(chose_BGcJ).repeat_interleave(l_sel, -1)", BACKENDS),
    Mutation("portable: shared load across documents", SELECTED, "if bool((start_Bc != start_Bc[:, :1]).any()):",
             "if False:", (*BACKENDS, *CHUNKING)),
    Mutation("portable: copied tokens after the query", SELECTED,
             "(token_BcGU < 0) | (token_BcGU > pos_Bc[..., None, None])", "(token_BcGU < 0)", CHUNKING),
    Mutation("portable: padding index −1 is read", SELECTED, "(token_BcGU < 0) | (token_BcGU >", "(token_BcGU >", CHUNKING),
    Mutation("portable: dV of a chosen block lost when shared", SELECTED,
             "dv_XV.index_add_(0, chunk.row.flatten(), dv.flatten(0, -2))",
             "dv_XV.index_copy_(0, chunk.row.flatten(), dv.flatten(0, -2))", (*CHUNKING, *BACKENDS)),
    Mutation("portable: gradient without its row correction", CHUNK, ".sub_(delta).mul_(p)", ".mul_(p)", BACKENDS),
    Mutation("portable: gradient without scale", CHUNK, ".mul_(p).mul_(scale)", ".mul_(p)", BACKENDS),
    Mutation("portable: half-precision scores", CHUNK, "return (q * scale) @ k.transpose(-1, -2)",
             "return ((q * scale).bfloat16() @ k.bfloat16().transpose(-1, -2)).to(q.dtype)", BACKENDS),
    # kernels/ops.py, kernels/precision.py
    Mutation("ops: autocast reaches the kernels", OPS,
             "without_autocast(x, getattr(_KERNELS[backend], function), *args)",
             "getattr(_KERNELS[backend], function)(*args)", AUTOCAST),
    Mutation("precision: autocast reaches backward", PRECISION,
             "einsum(f\"{of_out},{of_b}->{of_a}\", dout, b)", "torch.einsum(f\"{of_out},{of_b}->{of_a}\", dout, b)",
             AUTOCAST),
    Mutation("precision: values of another dtype are taken", PRECISION, "(v is None or q.dtype == v.dtype)", "True",
             AUTOCAST),
    Mutation("ops: gradient of the log-sum-exp dropped", OPS, "None if dlse is None else dlse.masked_fill", "None if True else dlse.masked_fill",
             LSE),
    Mutation("portable: log-sum-exp's gradient with the wrong sign", CHUNK, "delta.sub_(dlse)", "delta.add_(dlse)", LSE),
    Mutation("portable: keys that are not there are read", SELECTED, "(key < 0) | (key >= k_shape[1])",
             "(key < 0) & (key >= k_shape[1])", BACKENDS),
    # core
    Mutation("layout: documents share one block grid", LAYOUT, "block_pos_C = (block_C - cu_blocks[doc_C]) * geometry.d",
             "block_pos_C = block_C * geometry.d - cu[doc_C]", ATTENTION),
    Mutation("layout: next document is visible", LAYOUT, "torch.searchsorted(cu[1:], token_S, right=True)",
             "torch.searchsorted(cu[1:], token_S)", ATTENTION),
    Mutation("cache: stale ring slot", SLOTS, "self.write(pos_BS % self.n,", "self.write((pos_BS + 1) % self.n,", CACHE),
    Mutation("cache: ring keeps padding", SLOTS, "(pos_BS < end_B1) & (pos_BS >= end_B1 - self.n)",
             "(pos_BS >= end_B1 - self.n)", CACHE),
    Mutation("cache: long chunk overwrites itself", SLOTS, "(pos_BS < end_B1) & (pos_BS >= end_B1 - self.n)",
             "(pos_BS < end_B1)", CACHE),
    Mutation("cache: compressed block emitted one token early", CACHE_PY, "block_pos_BE + g.l <= end_B1",
             "block_pos_BE + g.l <= end_B1 + 1", CACHE),
    Mutation("cache: compression tail one token short", CACHE_PY, "(before_B1 - g.l)).clamp(max=n_new)",
             "(before_B1 - g.l + 1)).clamp(max=n_new)", CACHE),
    Mutation("cache: window starts one token late", CACHE_PY, "(w - 1 - self.length_B[:, None])",
             "(w - self.length_B[:, None])", CACHE),
    Mutation("cache: positions do not move on", CACHE_PY, "self.length_B[:, None] + torch.arange(n_new,",
             "0 * self.length_B[:, None] + torch.arange(n_new,", CACHE),
    Mutation("attention: gates in another order", FUNCTIONAL, "run.mix(gates_BSGX3, ",
             "run.mix(gates_BSGX3.flip(-1), ", ATTENTION),
    Mutation("attention: a branch is dropped", FUNCTIONAL, "compressed_out, selected_out, sliding_out)",
             "compressed_out, selected_out, 0 * sliding_out)", ATTENTION),
    Mutation("attention: selected keys not rotated", NSA, "rotate(k_sel, tables)", "k_sel", ATTENTION),
    Mutation("attention: compressed key rotated at its first token", NSA, "(begin_BC + self.geometry.l - 1)",
             "(begin_BC)", ATTENTION),
    Mutation("attention: cached compressed key rotated at its first token", NSA, "block_pos_BC + self.geometry.l - 1",
             "block_pos_BC", CACHE),
    Mutation("attention: values of two branches exchanged", NSA, "v_cmp, v_sel, v_win =", "v_cmp, v_win, v_sel =",
             ATTENTION),
    Mutation("compression: value position embedding dropped", "nsa/core/compression.py",
             "block_BClGX + self.pos_emb.to(block_BClGX.dtype)", "block_BClGX", ORACLE),
    Mutation("rope: angles in fp32", "nsa/core/rope.py", "dtype=torch.float64", "dtype=torch.float32", ("tests/core/test_rope.py",)),
    Mutation("rope: interleaved pairs", "nsa/core/rope.py", "torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
             "torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)", ORACLE),
    Mutation("gates: temperature multiplies", "nsa/core/gates.py", ") / self.temperature", ") * self.temperature", ORACLE),
    Mutation("reads: counted reads copy the prediction's window", "nsa/core/probe.py",
             "(start_BS + pos_BS + 1 - w).maximum(start_BS)", "(start_BS + pos_BS - w).maximum(start_BS)", READS),
    Mutation("probe: union counts every choice", "nsa/core/probe.py", "tiled[..., 1:] != tiled[..., :-1]",
             "tiled[..., 1:] == tiled[..., 1:]", READS),
    Mutation("geometry: partial block counted whole", "nsa/geometry.py", "+ (n_tokens - 1) % self.l_sel + 1",
             "+ self.l_sel", READS),
    # model
    Mutation("loss: labels of −100 are learned", "nsa/model/loss.py", "nll_n.masked_fill(~real_N[at], 0)", "nll_n",
             MODEL),
    Mutation("loss: mean over all rows", "nsa/model/loss.py", "real_N.sum().clamp(min=1)",
             "torch.ones_like(real_N).sum().clamp(min=1)", MODEL),
    Mutation("transformer: cache of one layer for all", "nsa/model/transformer.py",
             "block(x_BSD, cache=layer,", "block(x_BSD, cache=layers[0],", MODEL),
]  # fmt: skip
