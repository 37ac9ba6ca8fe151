"""What all tests share: one thread each, the pools' end, and which tests run by default."""

import os
import re
from pathlib import Path

import pytest

# Before torch is imported anywhere, and inherited by every process the tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

OPT_IN = ("full", "gpu", "slow")
DIST = Path(__file__).parent / "dist"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if DIST in item.path.parents:
            item.add_marker(pytest.mark.dist)
    if os.environ.get("DSL_FULL") == "1":
        return
    asked_for = set(re.findall(r"\w+", config.option.markexpr))
    hidden = [name for name in OPT_IN if name not in asked_for]
    deselected = [item for item in items if any(item.get_closest_marker(name) for name in hidden)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in set(deselected)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _end_of_the_pools():
    yield
    from tests import pool

    pool.shutdown()
