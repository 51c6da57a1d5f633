"""The safe reader returns what torch.load would for files of torch.save, and refuses everything else."""

import contextlib
import io
import pickle
import random
import zipfile

import numpy
import pytest
import torch

from nsa_train.checkpoint.safe_pickle import PickleRefused, read_pickle, read_torch_file
from tests.nsa_train.checkpoint.damaged_bytes import damaged_copies


def saved(value: object, **how) -> bytearray:
    stream = io.BytesIO()
    torch.save(value, stream, **how)
    return bytearray(stream.getvalue())


def read(content: bytearray) -> object:
    return read_torch_file(bytearray(content))


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        as_bytes = [
            t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8) for t in (left, right)
        ]
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)
    if isinstance(left, numpy.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_come_back(dtype):
    tensor = torch.arange(24).remainder(2).to(dtype).reshape(2, 3, 4)
    assert same(read(saved(tensor)), tensor)


def test_values_views_and_shared_storages_come_back():
    base = torch.arange(12.0).reshape(3, 4)
    value = {
        "plain": [None, True, 1, -1, 2**40, -(2**70), 1.5, float("inf"), "é", b"\x00\xff", (1, (2,)), {"a": {1: 2}}],
        "views": (base.t(), base[1:, ::2], base[0], base[0, 0], torch.empty(0, 3), torch.tensor(3)),
        "numpy": numpy.arange(6, dtype="f8").reshape(2, 3),
        "random": (random.getstate(), numpy.random.get_state(), torch.get_rng_state()),
    }
    assert same(read(saved(value)), value)
    shared = read(saved({"a": base, "b": base[0]}))
    shared["a"][0, 0] = 99
    assert shared["b"][0] == 99


def test_the_state_of_a_run_comes_back():
    from olmo_core.train.utils import EnvRngStates

    state = {"global_step": 3, "rng": EnvRngStates.current_state().as_dict(), "callbacks": {"a": {}}}
    assert same(read(saved(state)), state)


class Called:
    def __reduce__(self):
        return print, ("executed",)


def recursive() -> list:
    value: list = []
    value.append(value)
    return value


def deep() -> list:
    value: list = []
    for _ in range(200):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        Called(),
        print,
        torch.nn.Linear(1, 1),
        recursive(),
        deep(),
        numpy.array(["a"], dtype=object),
        range(3),
        {1, 2},
        {1.5: 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_value_is_refused(value):
    with pytest.raises(PickleRefused):
        read(saved(value))


def test_the_old_format_and_other_files_are_refused():
    for content in (
        saved({"a": 1}, _use_new_zipfile_serialization=False),
        bytearray(b""),
        bytearray(100),
        pickle.dumps(1),
    ):
        with pytest.raises(PickleRefused):
            read(bytearray(content))


def rewritten(change, **how) -> bytearray:
    """An archive of one tensor of 4 values with its records changed."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(4)))) as old, zipfile.ZipFile(stream, "w", **how) as new:
        for info in old.infolist():
            for name, content in change(info.filename, old.read(info)):
                new.writestr(name, content)
    return bytearray(stream.getvalue())


def test_an_unchanged_archive_is_read():
    assert same(read(rewritten(lambda name, content: [(name, content)])), torch.zeros(4))


def a_storage_that_is_too_small(name, content):
    return [(name, content[:8] if name.endswith("data/0") else content)]


def a_shape_beyond_the_storage(name, content):
    return [(name, content.replace(b"K\x04\x85", b"K\x08\x85"))]  # the shape, not the storage


def an_offset_beyond_the_storage(name, content):
    return [(name, content.replace(b"K\x00K\x04\x85", b"K\x01K\x04\x85"))]


def a_stride_of_nothing(name, content):
    """A view that repeats one value 2**28 times."""
    return [(name, content.replace(b"K\x04\x85", b"J\x00\x00\x00\x10\x85").replace(b"K\x01\x85", b"K\x00\x85"))]


def another_order_of_bytes(name, content):
    return [(name, b"big" if name.endswith("byteorder") else content)]


def no_pickle(name, content):
    return [] if name.endswith("data.pkl") else [(name, content)]


CHANGES = [
    a_storage_that_is_too_small,
    a_shape_beyond_the_storage,
    an_offset_beyond_the_storage,
    a_stride_of_nothing,
    another_order_of_bytes,
    no_pickle,
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_archive_that_claims_more_than_it_holds_is_refused(change):
    assert rewritten(change) != rewritten(lambda name, content: [(name, content)])
    with pytest.raises(PickleRefused):
        read(rewritten(change))


def test_a_compressed_archive_is_refused():
    with pytest.raises(PickleRefused, match="compressed"):
        read(rewritten(lambda name, content: [(name, content)], compression=zipfile.ZIP_DEFLATED))


def test_damaged_files_never_raise_anything_else():
    whole = saved({"a": torch.arange(5), "b": numpy.arange(3), "c": ["x", 1.5]})
    for broken in damaged_copies(whole, 400):
        with contextlib.suppress(PickleRefused):
            read_torch_file(broken)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # LONG_BINPUT: a memo of 2**31 entries
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINBYTES8: 2**63 bytes
        b"\x80\x02]" + b"]" * 200_000 + b"e.",  # brackets
        b"\x80\x02}" + b")" + b"\x85" * 9_000 + b"K\x01s.",  # a key so deep that hash() overflows the stack
        b"\x80\x02}(\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01K\x00u.",  # a key made to collide
        b"\x80\x02cbuiltins\nprint\n)R.",
        b"\x80\x02cos\nsystem\n.",
        b"(S'ls'\nios\nsystem\n.",  # INST
        b"\x82\x01.",  # EXT1
        b"}}b.",  # BUILD on a dict
        b"]}b.",
        b"(((.",
        b"0.",
        b".",
        b"",
    ],
)
def test_hostile_pickles_are_refused_at_once(raw):
    with pytest.raises(PickleRefused):
        read_pickle(raw, {})
