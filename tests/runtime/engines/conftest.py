"""Ray, started once for all tests of this folder, and stopped as soon as they are done."""

from __future__ import annotations

import os
import sys

import pytest

from transfusion.runtime import ray_engine
from transfusion.runtime.engines import open_engine

AMPLE = 3600.0
"""Seconds that a worker may take to come: minutes, on a busy machine. Of one that dies Ray tells at once."""
SETTINGS = {
    "worker_register_timeout_seconds": int(AMPLE),
    "health_check_timeout_ms": 1000 * int(AMPLE),
    "worker_niceness": 0,  # at 15, which it would be, they get next to nothing of a busy machine
    "enable_worker_prestart": False,  # processes for which nobody has asked
}


@pytest.fixture(scope="package")
def ray():
    """Ray on this machine; whoever hires workers then gets them from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "PATIENCE", AMPLE)
        patch.setenv("RAY_AUTH_MODE", "disabled")  # two that start at once would mix up their tokens
        ray = ray_engine.require_ray()
        path = os.pathsep.join(filter(None, sys.path))  # workers import what these tests define
        with pytest.MonkeyPatch.context() as often:
            often.setattr(ray_engine, "ATTEMPTS", 20)
            ray_engine.start(
                ray,
                num_cpus=4,
                log_to_driver=False,
                object_store_memory=ray_engine.STORE // 4,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                _system_config=SETTINGS,
            )
        yield ray
        ray.shutdown()


@pytest.fixture(scope="package")
def two(ray):
    """An engine of two workers."""
    with open_engine("ray", jobs=2) as engine:
        yield engine
