"""A disk that can be filled."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import SmallDisk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    yield SmallDisk(disk)
    subprocess.run(["umount", disk], check=True)
