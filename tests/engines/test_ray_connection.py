"""What Ray is told before it starts."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")


def test_ray_is_told_to_skip_its_paragraph_on_a_lost_worker_before_it_is_imported() -> None:
    look = "import dispfl.engines.ray_engine; from ray._private import ray_constants as read"
    command = [sys.executable, "-c", f"{look}; print(read.RAY_DEDUP_LOGS_SKIP_REGEX)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("^A worker died or was killed")
