"""Whether tiles are timed. Apart from what times them, so that it can be set where Triton is not installed."""

_tunes = False


def set_tuning(on: bool) -> None:
    global _tunes
    _tunes = on


def tunes() -> bool:
    return _tunes
