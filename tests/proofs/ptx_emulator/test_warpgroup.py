"""wgmma against numpy for both layouts and every swizzle; its fences, waits and proxies are demanded."""

import numpy as np
import pytest
import torch

from tests.proofs.ptx_emulator.ptx_snippets import run

rng = np.random.default_rng(0)
N = 32
SWIZZLES = {1: 128, 2: 64, 3: 32}


def numbers(*shape):
    x = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(torch.bfloat16)
    return x.float().numpy(), x.view(torch.int16).numpy().view(np.uint16)


def tile(bits, mode):
    """Rows of 128, 64 or 32 bytes with the swizzle of the manual's tables: chunk ^= row, as often as chunks repeat."""
    width, rows = SWIZZLES[mode], bits.shape[0]
    per_row = width // 2
    assert bits.shape[1] <= per_row
    memory = np.zeros(rows * per_row, np.uint16)
    for r in range(rows):
        for c in range(bits.shape[1]):
            chunk, inner = divmod(2 * c, 16)
            line = (r % 8) * width // 128  # of 128 bytes, within the atom of 8 rows
            memory[(r * width + (chunk ^ line) * 16 + inner) // 2] = bits[r, c]
    return memory


def descriptor(start, mode, stride, leading=16):
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


def body(memory_bytes, a, b, flags, *, wait="wait_group.sync.aligned 0", fence=True, proxy=True, touch=""):
    accumulators = ", ".join(f"%r{100 + i}" for i in range(N // 2))
    lines = [
        "\tmov.b32 %r1, 0;", "\tmul.wide.u32 %rd1, %r90, 16;", "\tadd.s64 %rd2, %rd90, %rd1;",
        "\tshl.b32 %r2, %r90, 4;",
    ]  # fmt: skip
    for first in range(0, memory_bytes, 128 * 16):
        lines.append(f"\tld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd2+{first}];")
        lines.append(f"\tst.shared.v4.b32 [%r2+{first}], {{%r3, %r4, %r5, %r6}};")
    lines += ["\tfence.proxy.async.shared::cta;"] if proxy else []
    lines += ["\tbar.sync 0;", f"\tmov.b64 %rd3, {a};", f"\tmov.b64 %rd4, {b};"]
    lines += [f"\tmov.b32 %r{100 + i}, 0f40000000;" for i in range(N // 2)]
    lines += ["\twgmma.fence.sync.aligned;"] if fence else []
    lines += [
        f"\twgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 {{{accumulators}}}, %rd3, %rd4, 1, 1, 1, {flags};",
        "\twgmma.commit_group.sync.aligned;", touch, f"\twgmma.{wait};",
        "\tmul.wide.u32 %rd5, %r90, 64;", "\tadd.s64 %rd5, %rd5, %rd91;",
    ]  # fmt: skip
    lines += [f"\tst.global.b32 [%rd5+{4 * i}], %r{100 + i};" for i in range(N // 2)]
    return "\n".join(lines)


def product_of(out):
    """[64, N] from N / 2 registers of 128 threads."""
    product = np.zeros((64, N), np.float32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(N // 2):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            product[row, 8 * (i // 4) + 2 * (lane % 4) + i % 2] = out[thread, i]
    return product


def both(mode, *, b_across):
    """A [64, 16] along K; B [16, N] along K, or across it along N. Shared memory, descriptors, and the product."""
    (a, a_bits), (b, b_bits) = numbers(64, 16), numbers(16, N)
    width = SWIZZLES[mode]
    parts = [tile(a_bits, mode)]
    start = parts[0].nbytes
    if b_across:
        per_row = width // 2
        slabs = [tile(b_bits[:, c : c + per_row], mode) for c in range(0, N, per_row)]
        b_descriptor = descriptor(start, mode, 8 * width, leading=slabs[0].nbytes)
        parts += slabs
    else:
        parts.append(tile(b_bits.T, mode))
        b_descriptor = descriptor(start, mode, 8 * width)
    memory = np.concatenate(parts)
    memory = np.concatenate([memory, np.zeros(-len(memory) % 1024, np.uint16)])
    return memory, descriptor(0, mode, 8 * width), b_descriptor, a @ b


@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("b_across", [False, True])
def test_operands_in_shared_memory(mode, b_across):
    memory, a, b, want = both(mode, b_across=b_across)
    out = np.zeros((128, N // 2), np.float32)
    text = body(memory.nbytes, a, b, f"0, {int(b_across)}")
    assert not run(text, memory, out, threads=128, shared=memory.nbytes)
    np.testing.assert_allclose(product_of(out), want + 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (dict(fence=False), "missing_fence"),
        (dict(proxy=False), "missing_fence"),
        (dict(wait="wait_group.sync.aligned 1"), "read_before_wait"),
        (dict(touch="\tadd.f32 %r100, %r100, %r101;"), "read_before_wait"),
        (dict(touch="\tst.shared.b32 [%r2], %r1;"), "write_before_wait"),
    ],
)
def test_what_is_missing_is_reported(change, kind):
    memory, a, b, _ = both(1, b_across=False)
    out = np.zeros((128, N // 2), np.float32)
    findings = run(body(memory.nbytes, a, b, "0, 0", **change), memory, out, threads=128, shared=memory.nbytes)
    assert kind in {finding.kind for finding in findings}


def test_programs_of_a_batch_have_groups_of_their_own():
    """The second program skips the product and uses the same registers while the first one's is in flight."""
    memory, a, b, want = both(1, b_across=False)
    out = np.zeros((2 * 128, N // 2), np.float32)
    text = body(memory.nbytes, a, b, "0, 0", touch="\tbra.uni $WAIT;\n$SKIP:\n\tmov.b32 %r100, 0f40400000;\n$WAIT:")
    text = text.replace("\tmov.b32 %r1, 0;", "\tsetp.eq.b32 %p1, %r92, 1;\n\t@%p1 bra $SKIP;\n\tmov.b32 %r1, 0;")
    text = text.replace(
        "\tmul.wide.u32 %rd5, %r90, 64;", "\tmad.lo.s32 %r8, %r92, 128, %r90;\n\tmul.wide.u32 %rd5, %r8, 64;"
    )
    assert not run(text, memory, out, threads=128, programs=2, shared=memory.nbytes)
    np.testing.assert_allclose(product_of(out[:128]), want + 2, rtol=1e-5, atol=1e-5)
    assert (out[128:, 0] == 3).all()
