"""Announcements of the engine are dropped; its warnings and the logging of the process are kept."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from olmo_core.utils import log_or_print, setup_logging

from nsa_train.train.engine.engine_log import (
    _ANNOUNCING_LOGS,
    logging_restored,
    without_announcements,
)

ROOT = Path(__file__).parents[4]


def test_a_transformer_engine_that_does_not_load_is_reported(caplog):
    log = logging.getLogger("olmo_core.nn.attention.te_attn_api")
    log.warning("transformer_engine unavailable, disabling TE attention: No module named 'transformer_engine'")
    assert not caplog.records
    log.warning("transformer_engine unavailable, disabling TE attention: libcublas.so.13: cannot open")
    assert len(caplog.records) == 1


def test_a_stop_is_announced_by_the_run_and_not_by_the_engine(caplog):
    log = logging.getLogger("olmo_core.train.trainer")
    log.warning("Run canceled from all ranks. Reason: SIGINT received")
    assert not caplog.records
    log.warning("Run canceled from rank 3. Reason: a callback")
    assert len(caplog.records) == 1


SET_UP = """
import nsa_train.train.engine.build
import logging, os, sys
print("imported", file=sys.stderr, flush=True)
from olmo_core.utils import set_env_var, setup_logging
import olmo_core.utils
from nsa_train.train.engine.engine_log import without_announcements
os.environ["OMP_NUM_THREADS"] = "1"
with without_announcements():
    set_env_var("NSA_TEST_A", "1")
    olmo_core.utils.log.warning("before")
    setup_logging()
    set_env_var("NSA_TEST_B", "1")
    set_env_var("OMP_NUM_THREADS", "8")
    olmo_core.utils.log.warning("after")
olmo_core.utils.log.warning("later")
"""


def test_importing_prints_nothing_and_announcements_are_dropped_around_the_set_up_of_logging_but_no_warning():
    words = [sys.executable, "-c", SET_UP]
    said = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    ).stdout
    assert said.startswith("imported\n"), said
    assert "env var" not in said
    assert [word for word in ("before", "after", "later") if word in said] == ["before", "after", "later"]


@pytest.mark.parametrize("name", _ANNOUNCING_LOGS)
def test_the_loggers_of_the_engine_have_these_names(name):
    assert name in logging.root.manager.loggerDict, "the engine logs under another name: adapt _ANNOUNCING_LOGS"


def test_logging_is_as_it_was():
    root = logging.getLogger()
    before = root.handlers[:], root.level, warnings.showwarning, logging.getLogRecordFactory()
    with logging_restored():
        setup_logging(force=True)
        assert root.level == logging.INFO
    assert before == (root.handlers, root.level, warnings.showwarning, logging.getLogRecordFactory())
    with without_announcements():
        log_or_print(logging.getLogger(_ANNOUNCING_LOGS[0]), "announced")
    assert before[:2] == (root.handlers, root.level)
