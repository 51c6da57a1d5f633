"""A launcher that restarts a failing rank prints its error once."""

from nsa_train.train.launch.launcher import _without_repeated_errors

ERROR = "DataError: /data has no manifest.json. Run nsa data prepare.\n"


def test_an_error_is_printed_in_full_once():
    shown: list[str] = []
    show = _without_repeated_errors(shown.append)
    for _ in range(3):
        show("step 1/5\n")
        show(ERROR)
    assert "".join(shown).count("manifest.json") == 1
    assert "".join(shown).count("DataError: the same as before\n") == 2
    assert "".join(shown).count("step 1/5\n") == 3, "only errors are shortened"


def test_another_error_is_printed_in_full():
    shown: list[str] = []
    show = _without_repeated_errors(shown.append)
    show(ERROR + ERROR.replace("/data", "/other"))
    assert "".join(shown) == ERROR + ERROR.replace("/data", "/other")


def test_lines_that_mention_an_error_are_left_alone():
    shown: list[str] = []
    show = _without_repeated_errors(shown.append)
    show("skipped after DataError: x\n")
    show("skipped after DataError: x\n")
    assert shown == ["skipped after DataError: x\n"] * 2
