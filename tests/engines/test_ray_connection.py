"""Ray's environment before it is imported."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")


def test_rays_log_about_lost_workers_is_suppressed_before_its_import() -> None:
    program = "import dispfl.engines.ray_pool; from ray._private import ray_constants as read"
    command = [sys.executable, "-c", f"{program}; print(read.RAY_DEDUP_LOGS_SKIP_REGEX)"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.startswith("^A worker died or was killed")
