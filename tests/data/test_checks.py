"""Data that no training can use are refused before the first round, and the sample is named."""

from pathlib import Path

import pytest
import torch
from messages import refused
from program import Dispfl, dispfl  # noqa: F401 (a fixture)
from torch import Tensor, nn
from torch.utils.data import Dataset

from dispfl import Federation
from dispfl.data.batches import ResidentSamples, samples_from
from dispfl.errors import DataError
from dispfl.peer.local_federation import free_ports
from dispfl.peer.run_site import run_site
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo

NAN = float("nan")
Pair = tuple[Tensor, Tensor]


def points(count: int = 12) -> Pair:
    return torch.ones(count, 3), torch.arange(count) % 2


def with_value(pair: Pair, row: int, value: float) -> Pair:
    inputs = pair[0].clone()
    inputs[row, 1] = value
    return inputs, pair[1]


def linear() -> nn.Module:
    return nn.Linear(3, 2)


class Lazy(Dataset[Pair]):
    """A Dataset that reads its samples one by one."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __len__(self) -> int:
        return len(self.pair[1])

    def __getitem__(self, row: int) -> Pair:
        return self.pair[0][row], self.pair[1][row]


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e300])
@pytest.mark.parametrize("part", [0, 1])
def test_a_federation_names_peer_part_and_sample(part: int, value: float) -> None:
    pair = [points(), points()]
    inputs, labels = pair[part]
    pair[part] = with_value((inputs.double(), labels), 7, value)
    with refused(DataError):
        Federation(linear, [(points(), points()), tuple(pair)])


def test_all_data_of_nan_and_labels_that_are_not_finite_are_refused() -> None:
    inputs, labels = points()
    with refused(DataError):
        samples_from((inputs * NAN, labels), "The data")
    with refused(DataError):
        samples_from((inputs, torch.tensor([0.5] * 11 + [-torch.inf])), "The data")


def test_only_the_rows_of_a_peer_are_checked() -> None:
    inputs, labels = with_value(points(), 0, NAN)
    healthy = ResidentSamples(inputs, labels, torch.arange(1, 12))
    assert samples_from(healthy, "The data") is healthy
    with refused(DataError):
        samples_from(ResidentSamples(inputs, labels, torch.tensor([4, 0])), "The data")


def test_a_dataset_is_checked_where_it_is_read_and_names_its_own_item() -> None:
    broken = Lazy(with_value(points(), 7, NAN))
    federation = Federation(linear, [(points(), points()), (broken, points())], rounds=1)
    with refused(DataError):
        federation.run()
    samples = samples_from(broken, "The data").take(torch.tensor([3, 7]))
    with refused(DataError):
        list(samples.batches(2))


def test_labels_that_the_loss_ignores_everywhere_are_refused() -> None:
    inputs, labels = points()
    ignored = (inputs, torch.full_like(labels, -100))
    with refused(DataError):
        Federation(linear, [(points(), points()), (ignored, points())]).run()
    with refused(DataError):
        Federation(linear, [(points(), ignored)]).run()
    partly = (inputs, labels.index_fill(0, torch.arange(4), -100))
    run = Federation(linear, [(partly, points())], rounds=1).run()
    assert run.summary["failures"] == 0


FACTORY = """import torch
def load(site=""):
    inputs = torch.ones(12, 3)
    inputs[5] = {value}
    return (torch.ones(12, 3), torch.arange(12) % 2), (inputs, torch.arange(12) % 2)
"""


@pytest.mark.parametrize("command", ["run", "up"])
def test_the_command_line_refuses_a_factorys_nan_and_leaves_nothing(
    dispfl: Dispfl,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken_numbers.py").write_text(FACTORY.format(value="float('nan')"))
    result = dispfl(command, "data.factory=broken_numbers:load", "model=mlp", "peers=2")
    assert result.code == 1
    assert "sample 5 has the input nan" in " ".join(result.err.split())
    assert not Path("runs").exists()


def test_a_run_without_a_single_good_step_ends_with_exit_code_1_and_keeps_its_results(
    dispfl: Dispfl,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("huge_numbers.py").write_text(
        FACTORY.format(value="1").replace("ones(12, 3), ", "full((12, 3), 1e38), ")
    )
    words = ["data.factory=huge_numbers:load", "model.factory=huge_net:build", "peers=2"]
    Path("huge_net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Linear(3, 2)\n"
    )
    few = ["partition=iid", "rounds=2", "train.lr=1e30", "train.clip_norm=0"]
    result = dispfl("run", *words, *few, "--out", "run")
    assert result.code == 1
    assert "every step of 2 peers (000, 001) failed" in " ".join(result.err.split())
    assert Path("run/summary.json").exists()
    assert dispfl("run", "--resume", "run").code == 1
    assert dispfl("compare", "local", *words, *few, "--out", "grid").code == 1


def test_a_site_without_a_single_good_step_says_so(tmp_path: Path) -> None:
    settings = {
        "data": {"path": "rows.csv", "label": "label"},
        "model": "mlp",
        "rounds": 1,
        "train": {"epochs": 1, "lr": 1e30, "clip_norm": 0, "weight_decay": 1e30},
    }
    where = SiteInfo(name="clinic", listen=f"127.0.0.1:{free_ports(1)[0]}")
    site = Site.create(tmp_path / "clinic", where, SiteConfig.from_values(settings).to_toml())
    rows = "".join(f"{k},{k % 7},{k % 2}\n" for k in range(60))
    (site.folder / "rows.csv").write_text(f"a,b,label\n{rows}")
    with pytest.raises(Exception, match="every step of peer clinic failed"):
        run_site(site)
    assert (site.run_folder / "summary.json").exists()
