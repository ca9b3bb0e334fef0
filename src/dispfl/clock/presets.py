"""Fleets with names: classes of devices with shares of the peers, and the network between them.

Where a number is measured, the comment names its source. The others are round numbers that we
assume for such devices; give your own in `classes` or in a file.
"""

import csv
from collections.abc import Callable, Mapping
from importlib.resources import files

from dispfl.clock.fleet import WORLD, Network, Preset
from dispfl.core.device_classes import DeviceClass


def preset(name: str) -> Preset:
    """Return the fleet with a name."""
    return PRESETS[name]()


def hospitals() -> Preset:
    """Few sites with good machines and steady links."""
    return Preset(
        "workstations and servers with GPUs behind the links of clinics; assumed",
        {
            "clinic": DeviceClass(share=0.5, speed=1e12, up=50, down=100, watts=250),
            "university": DeviceClass(share=0.3, speed=5e12, up=500, down=500, watts=400),
            "practice": DeviceClass(share=0.2, speed=2e11, up=10, down=50, watts=120),
        },
        Network(latency=15, latency_sigma=0.5, server_up=1000, server_down=1000),
    )


def phones() -> Preset:
    """Telephones of three ages, whose links are those of FedScale's devices."""
    # FedScale's client_device_capacity: the median link has 6.1 Mbit/s, 26 % are below 3 Mbit/s.
    # It has one rate for both directions. Speeds and watts are assumed.
    return Preset(
        "phones of three ages; links after FedScale's 500,000 devices, speeds assumed",
        {
            "old": DeviceClass(share=0.26, speed=2e9, up=2, down=2, watts=3),
            "common": DeviceClass(share=0.48, speed=8e9, up=6.1, down=6.1, watts=4),
            "new": DeviceClass(share=0.26, speed=3e10, up=20, down=20, watts=5),
        },
        Network(latency=50, latency_sigma=0.5, server_up=10_000, server_down=10_000),
    )


def edge_boards() -> Preset:
    """Small boards in factories and homes."""
    return Preset(
        "single-board computers at asymmetric home and office links; assumed",
        {
            "without-gpu": DeviceClass(share=0.6, speed=8e9, up=10, down=50, watts=6),
            "with-gpu": DeviceClass(share=0.4, speed=1e11, up=10, down=50, watts=10),
        },
        Network(latency=20, latency_sigma=0.5, server_up=1000, server_down=1000),
    )


def cloud_regions() -> Preset:
    """Equal servers in ten regions of a cloud."""
    # Mbit/s between regions: DivShare's released experiments. Latencies: servers around the world,
    # from the simulator of Plexus (clock/traces/README.md). Within a region only the servers' own
    # links limit a transfer.
    regions: dict[str, None] = {}
    path_mbps = {}
    trace = files("dispfl.clock").joinpath("traces/cloud_regions_mbps.csv").read_text()
    for row in csv.DictReader(trace.splitlines()):
        origin = row["origin"]
        destination = row["dest"]
        path_mbps[origin, destination] = path_mbps[destination, origin] = float(row["mbps"])
        regions |= dict.fromkeys((origin, destination))
    server = DeviceClass(share=1 / len(regions), speed=5e11, up=1000, down=1000, watts=150)
    return Preset(
        "equal servers in ten cloud regions; links measured by DivShare, latencies by Plexus",
        dict.fromkeys(regions, server),
        Network(latencies=WORLD, server_up=1000, server_down=1000),
        path_mbps,
    )


PRESETS: Mapping[str, Callable[[], Preset]] = {
    "hospitals": hospitals,
    "phones": phones,
    "edge-boards": edge_boards,
    "cloud-regions": cloud_regions,
}
"""The fleets by name."""
