import pytest

from nsa.errors import ConfigError
from nsa_train.planning.hardware import DEVICES, hardware_here, parse_target


def test_a_target_is_a_name_and_a_count():
    target = parse_target("a100-80gb:2")
    assert (target.device.name, target.count, target.here, str(target)) == ("a100-80gb", 2, False, "a100-80gb:2")
    assert str(parse_target("H200")) == "h200"


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ConfigError, match=r"a100-80gb\?"):
        parse_target("a100-80g")


@pytest.mark.parametrize("text", ["h200:0", "h200:", "h200:two"])
def test_a_count_is_a_number(text):
    with pytest.raises(ConfigError, match=text):
        parse_target(text)


def test_memory_is_what_is_available_and_not_the_nominal_size():
    for name, gigabytes in (("a100-80gb", 80), ("a100-40gb", 40), ("rtx3090", 24), ("rtx4090", 24)):
        assert 0.9 * gigabytes < DEVICES[name].memory_gib < gigabytes
        assert parse_target(name).memory_bytes == int(DEVICES[name].memory_gib * 1024**3)


def test_this_machine_is_here_and_its_ranks_share_its_memory():
    one, four = hardware_here("cpu"), hardware_here("cpu", 4)
    assert one.here
    assert parse_target("here:4", "cpu") == four
    assert parse_target("here", "cpu").count == 1
    assert four.memory_bytes == pytest.approx(one.memory_bytes / 4, abs=4)
    assert hardware_here("cpu", 8, ranks_here=4).memory_bytes == four.memory_bytes
