"""Fleets of presets, classes and files; what is wrong with them is said in one sentence."""

from pathlib import Path

import numpy as np
import pytest
from messages import refused

from dispfl.clock.availability import HOUR, read_traces
from dispfl.clock.fleet import Network, make_fleet, read_devices
from dispfl.core.device_classes import DeviceClass
from dispfl.errors import ConfigError
from dispfl.experiment import Simulation


@pytest.mark.parametrize(
    "settings",
    [
        {"fleet": "fones"},
        {"fleet": "missing.csv"},
        {"fleet": "phones", "classes": {"a": {"share": 1, "speed": 1e9}}},
        {"classes": {"a": {"share": 1, "up": 0, "speed": 1e9}}},
        {"classes": {"a": {"share": 0.5, "speed": 1e9}, "b": {"share": 0.4, "speed": 1e9}}},
        {"classes": {"a": {"share": 0.5, "speed": 1e9}, "b": {"up": 5}}},
        {"classes": {"a": {"share": 1, "speed": 1e9, "on_hours": 2}}},
        {"classes": {"a": {"speed": 1e9, "on_hours": 1e300, "off_hours": 1}}},
        {"fleet": "phones", "deadline": 1e300},
        {"fleet": "phones", "schedule": "async", "hours_per_round": 1e300},
        {"classes": {"a": {"share": 1, "speed": 1e9, "daily": "25:00-06:00"}}},
        {"classes": {"a": {"share": 1, "speed": 1e9, "daily": "06:00-06:00"}}},
        {"classes": {"a": {"speed": 1e9, "daily": "06:00-07:00", "availability": "trace.csv"}}},
        {"classes": {"a": {"share": 1, "speed": 1e9, "availability": "missing.csv"}}},
        {"fleet": "phones", "network": {"server_up": 0}},
        {"fleet": "phones", "network": {"latencies": "missing.csv"}},
        {"network": {"latency": 20}},
        {"network": "cnn"},
    ],
    ids=str,
)
def test_a_clock_that_cannot_be_made_is_refused(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(ConfigError):
        Simulation(peers=4, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "speed,up\n",
        "speed,up\n1e9,0\n",
        "speed,up\n1e9,\n",
        "speed,up\n1e9,-3\n",
        "up,down\n3,3\n",
        "sped\n3\n",
        "speed,daily\n1e9,always\n",
        "speed,up\n1e9,3\n1e9\n",
        "speed,up\n1e9,3,4\n",
    ],
)
def test_a_file_of_devices_with_gaps_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text(content)
    with refused(ConfigError, key="fleet"):
        read_devices(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "device,from,to\na,0,1\n",
        "device,on,off\na,0,\n",
        "device,on,off\na,-1,2\n",
        "device,on,off\na,2,2\n",
        "device,on,off\na,0,1e-13\n",
        "device,on,off\na,0,1e300\n",
        "device,on,off\na,0,2\nb,0,1\na,1,3\n",
        "device,on,off\na,nan,2\n",
        "device,on,off\na,0,2\na,3\n",
        "device,on,off\na,0,2\na,3,4,5\n",
    ],
)
def test_a_trace_with_gaps_or_negative_times_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with refused(ConfigError, key="classes"):
        read_traces(path)


def test_a_device_of_a_trace_computes_while_it_is_online_and_the_file_repeats(
    tmp_path: Path,
) -> None:
    """Online from hour 1 to 2 and from 3 to 4 of every 4: three hours' work started at 0 takes
    until hour 6, in the second turn of the file."""
    path = tmp_path / "trace.csv"
    path.write_text("device,on,off\na,1,2\na,3,4\n")
    classes = {"a": DeviceClass(speed=1e9, availability=str(path))}
    fleet = make_fleet(None, classes, Network(), ["000", "001"], seed=0)
    assert fleet is not None
    availability = fleet.availability("000")
    assert not availability.is_online(0)
    assert availability.is_online(HOUR)
    assert availability.finish(0, 3 * HOUR) == 6 * HOUR


def test_objects_in_an_npz_file_are_not_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "devices.npz"
    np.savez(path, speed=np.array([{"a": 1}], dtype=object))
    with refused(ConfigError, key="fleet"):
        read_devices(path)


def test_a_truncated_npz_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "devices.npz"
    np.savez(path, speed=np.array([1e9, 2e9]))
    whole = path.read_bytes()
    for size in (0, 3, 60, len(whole) - 1):
        path.write_bytes(whole[:size])
        with refused(ConfigError, key="fleet"):
            read_devices(path)


@pytest.mark.parametrize("content", ["1,2\n3\n", "0,-5\n5,0\n", "0,x\n5,0\n", ""])
def test_a_matrix_of_latencies_with_gaps_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "latencies.csv"
    path.write_text(content)
    with refused(ConfigError, key="network.latencies"):
        make_fleet("phones", {}, Network(latencies=str(path)), ["a", "b"], 0)


def test_devices_of_files_are_dealt_to_the_peers(tmp_path: Path) -> None:
    """FedScale's fields: 60 ms per sample of 0.6 GFLOPs are 10 GFLOP/s; 6,100 kbit/s both ways."""
    path = tmp_path / "devices.npz"
    np.savez(path, computation=np.array([60.0, 60.0]), communication=np.array([6100, 6100]))
    fleet = make_fleet(str(path), {}, Network(), ["a", "b", "c"], 0)
    assert fleet is not None
    for device in fleet.devices.values():
        assert (device.speed, device.up, device.down) == (1e10, 6.1, 6.1)

    path = tmp_path / "devices.csv"
    path.write_text("class,speed,up,down\nboard,1e9,1,2\nserver,1e12,100,100\n")
    fleet = make_fleet(str(path), {}, Network(), ["a", "b"], 0)
    assert fleet is not None
    assert sorted(fleet.class_of.values()) == ["board", "server"]


def test_classes_with_devices_are_a_fleet_of_their_own() -> None:
    classes = {"slow": DeviceClass(share=0.5, speed=1e9), "fast": DeviceClass(speed=1e10, up=8)}
    fleet = make_fleet(None, classes, Network(), [*"abcd"], 0)
    assert fleet is not None
    assert fleet.class_of == {"a": "slow", "b": "slow", "c": "fast", "d": "fast"}
    assert fleet.uplink("c").bandwidth == 10**6
    assert make_fleet(None, {"a": DeviceClass(share=1)}, Network(), [*"abcd"], 0) is None


def test_latencies_of_the_world_are_half_a_round_trip() -> None:
    fleet = make_fleet("cloud-regions", {}, Network(), ["a", "b"], 0)
    assert fleet is not None
    assert 10**5 < fleet.latency("a", "b") < 4 * 10**8
    assert fleet.path_limit("a", "b") >= 21 * 125_000
