"""Options and process-wide settings of the test run; notebooks are collected by nbs/conftest.py."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# CI judges a commit, so it must judge the same way twice; elsewhere every run looks for new examples.
settings.register_profile("ci", derandomize=True, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser):
    parser.addoption("--nb-flags", default="", help="also run what is marked: 'slow', 'gpu' or 'slow gpu'")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread():
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    flags = set(config.getoption("--nb-flags").split())
    for item in items:
        for flag in ("slow", "gpu"):
            if flag in item.keywords and flag not in flags:
                item.add_marker(pytest.mark.skip(reason=f"marked {flag}: run with --nb-flags {flag}"))
