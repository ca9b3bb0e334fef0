"""A run that has just ended and the same run loaded from its directory give the same models, masks
and metrics."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl import DisPFL, Experiment, Federation, Local, Metric, Run, Train, extras, load_dataset
from dispfl.core.metric import accuracy
from dispfl.errors import ConfigError, RunError
from dispfl.peer.local_federation import free_ports
from dispfl.peer.run_site import run_site
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.site import Site, SiteInfo

QUICK = Train(epochs=1, batch_size=8)
Points = Callable[[int, int], tuple[Tensor, Tensor]]


def closeness(outputs: Tensor, labels: Tensor) -> float:
    """A metric of the user's own: the share of right answers, doubled."""
    return 2 * accuracy(outputs, labels)


class Own(Local):
    """A method of the user's own, which no config can name."""


@pytest.fixture
def make(tmp_path: Path, net: Callable[[], nn.Module], points: Points) -> Callable[..., Run]:
    """`make(method=..., ...)`: two rounds of three tiny peers, in a run directory."""

    def run(model: Callable[[], nn.Module] = net, **changes: Any) -> Run:
        peers = [(points(20, k), points(10, 1000 + k)) for k in range(3)]
        return Federation(model, peers, train=QUICK, workers=1, **changes, rounds=2).run(
            out=tmp_path / "run"
        )

    return run


def assert_same(one: Run, other: Run, inputs: Tensor) -> None:
    for k in range(len(one.metrics.roster)):
        assert one.model(k)(inputs).equal(other.model(k)(inputs))
        ours, theirs = one.masks(k), other.masks(k)
        assert list(ours) == list(theirs)
        assert all(ours[name].equal(theirs[name]) for name in ours)
    assert one.metrics == other.metrics
    assert one.config == other.config
    assert one.accuracy == other.accuracy


def test_a_run_made_in_python_is_loaded_with_its_model_function(
    make: Callable[..., Run], net: Callable[[], nn.Module], points: Points
) -> None:
    run = make(method=DisPFL(density=0.5))
    assert run.out
    loaded = Run.load(run.out, model=net)
    assert_same(run, loaded, points(5, 7)[0])
    assert {
        k: v for k, v in run.summary.items() if k != "peak_rss_mb"
    }.items() <= loaded.summary.items()
    assert loaded.split is None
    for k in range(3):
        assert loaded.evaluate(k, points(10, 1000 + k)) == run.accuracy[k]


def test_masks_are_bool_tensors_by_parameter_that_keep_what_the_model_keeps(
    make: Callable[..., Run],
) -> None:
    run = make(method=DisPFL(density=0.5))
    masks, parameters = run.masks(1), dict(run.model(1).named_parameters())
    assert {name: mask.shape for name, mask in masks.items()} == {
        name: p.shape for name, p in parameters.items()
    }
    assert all(mask.dtype == torch.bool for mask in masks.values())
    assert sum(int(mask.sum()) for mask in masks.values()) == run.states["001"].model.mask.kept < 67
    assert all(not parameters[name][~mask].any() for name, mask in masks.items())


def test_without_the_model_function_metrics_and_config_are_loaded_and_a_model_is_refused(
    make: Callable[..., Run],
) -> None:
    run = make()
    assert run.out
    loaded = Run.load(str(run.out))
    assert loaded.metrics == run.metrics
    assert loaded.config["method"]["density"] == 0.5
    for use in (loaded.model, loaded.masks):
        with pytest.raises(RunError) as refused:
            use(0)
        assert (
            str(refused.value)
            == f"{run.out} was made in Python, so only you have its network: give the function that"
            " builds it, Run.load(..., model=...)."
        )


def test_what_is_the_callers_own_is_asked_for(
    make: Callable[..., Run], net: Callable[[], nn.Module]
) -> None:
    own = Metric(closeness, higher_is_better=True)
    run = make(method=Own(), metric=own)
    assert run.out
    loaded = Run.load(run.out, model=net)
    with refused(RunError):
        loaded.model(0)
    loaded = Run.load(run.out, model=net, method=Own())
    inputs = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    with refused(RunError):
        loaded.evaluate(0, inputs)
    assert Run.load(run.out, model=net, method=Own(), metric=own).evaluate(
        0, inputs
    ) == run.evaluate(0, inputs)


def test_a_network_that_does_not_fit_is_refused(make: Callable[..., Run]) -> None:
    run = make()
    assert run.out
    with refused(RunError):
        Run.load(run.out, model=lambda: nn.Linear(4, 3)).model(0)


def test_frozen_parameters_must_be_those_of_the_run(make: Callable[..., Run]) -> None:
    def frozen() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        module[0].requires_grad_(False)
        return module

    pretrained = frozen()
    run = make(frozen, init=pretrained)
    assert run.out
    with refused(RunError):
        Run.load(run.out, model=frozen).model(0)
    loaded = Run.load(run.out, model=lambda: copy.deepcopy(pretrained))
    assert_same(run, loaded, torch.ones(2, 4))


SMALL: dict[str, Any] = {
    "peers": 3,
    "rounds": 2,
    "workers": 1,
    "eval_every": 2,
    "topology": "full",
    "model": "mlp",
    "partition": {"samples_per_peer": 16, "test_samples_per_peer": 10},
    "train": {"epochs": 1, "batch_size": 16},
}


@pytest.mark.parametrize(
    "method",
    [{}, "fedavg", "ditto", "subfedavg", "dpsgd-ft", {"structure": "channels", "density": 0.5}],
)
def test_a_run_of_the_command_line_is_loaded_without_further_arguments(
    method: Any, tmp_path: Path
) -> None:
    run = Experiment(**SMALL, method=method).run(tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    images = load_dataset("fashion-sample").samples()[1]
    assert_same(run, loaded, next(images.batches(5))[0])
    assert run.split is not None
    assert loaded.split is not None
    rows = loaded.split.test[2]
    assert rows.equal(run.split.test[2])
    assert loaded.evaluate(2, images.take(rows)) == run.accuracy[2]


def test_a_sites_folder_and_its_run_directory_are_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "alice").mkdir()
    settings: dict[str, Any] = {
        "rounds": 1,
        "data": {"path": "table.csv"},
        "model": "mlp",
        "train": {"epochs": 1, "batch_size": 8},
    }
    where = SiteInfo(name="alice", listen=f"127.0.0.1:{free_ports(1)[0]}")
    site = Site.create(tmp_path / "alice", where, SiteConfig(**settings).to_toml())
    rows = [f"{k % 7},{k % 3},{k % 2}" for k in range(40)]
    (site.folder / "table.csv").write_text("\n".join(["age,weight,label", *rows]))
    run_site(site)
    one, other = Run.load(site.folder), Run.load(site.run_folder)
    assert one.metrics.roster == ["alice"]
    assert_same(one, other, torch.ones(3, 2))
    assert one.model("alice")(torch.ones(3, 2)).shape == (3, 2)
    assert one.out == site.run_folder
    assert re.fullmatch(
        r"Run\(dispfl, 1 peer, 1 round, accuracy [01]\.\d{3} ± 0\.000 over peers, in .*\)",
        repr(one),
    )


def test_an_unfinished_run_has_models_and_no_summary(
    make: Callable[..., Run], net: Callable[[], nn.Module]
) -> None:
    run = make()
    assert run.out
    (run.out / "summary.json").unlink()
    loaded = Run.load(run.out, model=net)
    assert loaded.model(0)(torch.ones(1, 4)).equal(run.model(0)(torch.ones(1, 4)))
    with refused(RunError):
        _ = loaded.summary


def test_a_folder_that_is_no_run_is_a_sentence(tmp_path: Path) -> None:
    with refused(RunError):
        Run.load(tmp_path)


def test_the_frame_has_a_row_for_each_round_or_for_each_round_and_peer(
    make: Callable[..., Run],
) -> None:
    pytest.importorskip("pandas", reason="the extra dispfl[pandas] is not installed")
    run = make(eval_every=2)
    frame = run.metrics.frame()
    assert list(frame["round"]) == [0, 1]
    assert frame["accuracy"].isna().tolist() == [True, False]
    assert frame["accuracy"][1] == run.metrics[1]["scores"]["accuracy"]["mean"]
    assert frame["accuracy_std"][1] == run.metrics[1]["scores"]["accuracy"]["std"]
    assert frame["busiest.wire_mb"].tolist() == [
        record["busiest"]["wire_mb"] for record in run.metrics
    ]
    assert frame["failures"].tolist() == [0, 0]
    peers = run.metrics.frame(per_peer=True)
    assert peers[["round", "peer"]].values.tolist() == [
        [t, f"00{k}"] for t in range(2) for k in range(3)
    ]
    assert peers[peers["round"] == 1]["accuracy"].tolist() == run.accuracy


def test_a_frame_without_pandas_is_a_sentence(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        run.metrics.frame()
    assert (
        str(refused.value)
        == "frame() needs pandas, which is not installed: pip install 'dispfl[pandas]'."
    )


def test_a_run_is_one_line_and_in_a_notebook_its_learning_curve(make: Callable[..., Run]) -> None:
    run = make()
    mean, std = (
        run.metrics[-1]["scores"]["accuracy"]["mean"],
        run.metrics[-1]["scores"]["accuracy"]["std"],
    )
    line = (
        f"Run(dispfl, 3 peers, 2 rounds, accuracy {mean:.3f} ± {std:.3f} over peers, in {run.out})"
    )
    assert repr(run) == line
    page = run._repr_html_()
    assert page.startswith('<div class="dispfl-run">')
    assert line in page
    assert f"round 2\naccuracy: {mean:.3f} ± {std:.3f}" in page
    rules = page[page.index("<style>") + 7 : page.index("</style>")].strip().splitlines()
    assert all(rule.startswith(".dispfl-run") for rule in rules)  # nothing else on the page changes
