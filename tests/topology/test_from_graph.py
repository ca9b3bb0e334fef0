"""Topologies from matrices, files and networkx graphs: by hand, with the place of what is wrong."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from messages import refused
from torch import Tensor, nn

from dispfl import DisPFL, Federation, FedFOMO, GraphTopology, Ring, Run, StopRun, Train
from dispfl.config import compose
from dispfl.core.averaging import average_of
from dispfl.errors import ConfigError
from dispfl.methods.dpsgd import DPSGD
from dispfl.peer.setup.site_config import SiteConfig
from dispfl.peer.setup.spec import federation_spec, spec_difference
from dispfl.round.round import initial_states
from dispfl.runs.directory import read_config
from dispfl.testing.rounds import tiny_context
from dispfl.topology import Topology, peer_names

networkx = pytest.importorskip("networkx")
THREE = peer_names(3)
STAR = [[0, 1, 1], [1, 0, 0], [0, 0, 0]]
"""000 receives from both others, 001 from 000, 002 from nobody."""
STAR_GRAPH = {"000": ["001", "002"], "001": ["000"], "002": []}
WEIGHTED = np.array([[0.5, 0.25, 0.25], [0.6, 0, 0], [0, 0, 0]])


def from_text(text: str, path: Path, **settings: Any) -> Topology:
    path.write_text(text)
    return GraphTopology(path=str(path), **settings)


def saved(array: Any, path: Path) -> str:
    np.save(path, array)
    return str(path)


def digraph(*edges: tuple[Any, ...]) -> Any:
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(3))
    graph.add_edges_from([(u, v, {"weight": w[0]} if w else {}) for u, v, *w in edges])
    return graph


@pytest.mark.parametrize(
    "make",
    [
        lambda path: GraphTopology(STAR),
        lambda path: GraphTopology(np.array(STAR, dtype=bool)),
        lambda path: GraphTopology(torch.tensor(STAR)),
        lambda path: GraphTopology(np.array(STAR) + np.eye(3, dtype=int)),  # its own is averaged
        lambda path: GraphTopology(digraph((0, 1), (0, 2), (1, 0))),
        lambda path: GraphTopology(networkx.to_numpy_array(digraph((0, 1), (0, 2), (1, 0)))),
        lambda path: GraphTopology(path=saved(STAR, path / "star.npy")),
        lambda path: from_text("0,1,1\n1,0,0\n0,0,0\n", path / "star.csv"),
        lambda path: from_text(
            ",000,001,002\n000,0,1,1\n001,1,0,0\n002,0,0,0\n", path / "names.csv"
        ),
        lambda path: from_text("000,001,002\n0,1,1\n1,0,0\n0,0,0\n", path / "header.csv"),
        lambda path: from_text("receiver,sender\n0,2\n0,1\n1,0\n", path / "edges.csv"),
        lambda path: from_text("# a star\n000 001\n000 002\n\n001 000\n", path / "edges.txt"),
        lambda path: from_text("receiver sender\n0 1\n0 2\n1 0\n", path / "edges.edgelist"),
    ],
)
def test_the_row_receives_from_the_column_and_the_first_of_an_edge_from_the_second(
    make: Callable[[Path], Topology], tmp_path: Path
) -> None:
    topology = make(tmp_path)
    topology.check(3)
    topology.check_roster(THREE)
    assert topology.online_neighbours(0, 0, THREE) == STAR_GRAPH
    assert topology.row(0, 7, THREE, "000") == (["001", "002"], ["001"])
    assert not topology.is_weighted
    assert topology.mixing_weights(0, 0, THREE, "000") is None
    assert topology.degrees(3) == [2, 1, 0]
    assert topology.connections(3) == 2


def test_an_undirected_graph_and_an_undirected_list_have_both_directions(tmp_path: Path) -> None:
    path_of_three = {"000": ["001"], "001": ["000", "002"], "002": ["001"]}
    listed = from_text("0 1\n2 1\n", tmp_path / "edges.txt", directed=False)
    assert listed.neighbours(0, 0, THREE) == path_of_three
    assert GraphTopology(networkx.path_graph(3)).neighbours(0, 0, THREE) == path_of_three


@pytest.mark.parametrize(
    "make",
    [
        lambda path: GraphTopology([STAR, np.eye(3, k=1), np.zeros((3, 3))]),
        lambda path: GraphTopology(
            [digraph((0, 1), (0, 2), (1, 0)), digraph((0, 1), (1, 2)), digraph()]
        ),
        lambda path: GraphTopology(
            path=saved([STAR, np.eye(3, k=1), np.zeros((3, 3))], path / "rounds.npy")
        ),
        lambda path: from_text(
            "receiver,sender,round\n0,1,1\n1,2,1\n0,1,0\n0,2,0\n1,0,0\n0,0,2\n", path / "edges.csv"
        ),
        lambda path: from_text(
            "0 1 1 0\n0 2 1 0\n1 0 1 0\n0 1 1 1\n1 2 1 1\n2 2 1 2\n", path / "e"
        ),
    ],
)
def test_graphs_by_round_are_repeated_in_turn(
    make: Callable[[Path], Topology], tmp_path: Path
) -> None:
    topology = make(tmp_path)
    chain = {"000": ["001"], "001": ["002"], "002": []}
    nobody: dict[str, list[str]] = {peer: [] for peer in THREE}
    for t, graph in enumerate([STAR_GRAPH, chain, nobody, STAR_GRAPH, chain]):
        assert topology.neighbours(0, t, THREE) == graph


@pytest.mark.parametrize(
    "make",
    [
        lambda path: GraphTopology(WEIGHTED),
        lambda path: GraphTopology(digraph((0, 0, 0.5), (0, 1, 0.25), (0, 2, 0.25), (1, 0, 0.6))),
        lambda path: from_text(
            "receiver,sender,weight\n0,0,0.5\n0,1,0.25\n0,2,0.25\n1,0,0.6\n", path / "edges.csv"
        ),
    ],
)
def test_the_own_weight_is_on_the_diagonal_or_the_rest_of_1(
    make: Callable[[Path], Topology], tmp_path: Path
) -> None:
    topology = make(tmp_path)
    assert topology.is_weighted
    assert topology.mixing_weights(0, 0, THREE, "000") == {"000": 0.5, "001": 0.25, "002": 0.25}
    assert topology.mixing_weights(0, 0, THREE, "001") == {"000": 0.6, "001": 0.4}
    assert topology.mixing_weights(0, 0, THREE, "002") == {"002": 1.0}


def test_names_of_sites_are_found_in_every_roster_that_has_them(tmp_path: Path) -> None:
    topology = from_text("oslo bergen\nbergen oslo\noslo turku\n", tmp_path / "sites.txt")
    assert topology.row(0, 0, ["bergen", "oslo"], "oslo") == (["bergen"], ["bergen"])
    with refused(ConfigError, key="topology.path"):  # a site that the graph does not name
        topology.row(0, 0, ["bergen", "oslo", "vaasa"], "vaasa")
    with refused(ConfigError, key="topology.path"):  # in a simulation every name is a peer's
        topology.check_roster(["bergen", "oslo"])


def test_numbers_that_are_names_are_names() -> None:
    """The roster is sorted as text: 10 stands before 9."""
    graph = networkx.DiGraph([(9, 10)])
    assert GraphTopology(graph).neighbours(0, 0, ["10", "9"]) == {"10": [], "9": ["10"]}


BAD = {
    "no-numbers.csv": "0,1\nx,0\n",
    "ragged.csv": "0,1,1\n1,0\n0,0,0\n",
    "negative.csv": "0,1\n-1,0\n",
    "nan.csv": "0,nan\n1,0\n",
    "names.csv": ",a,b\na,0,1\nc,1,0\n",
    "twice.csv": "a,a\n0,1\n1,0\n",
    "column.csv": "receiver,sender,colour\n0,1,red\n",
    "pair.txt": "0 1\n2\n",
    "five.txt": "0 1 1 0 9\n",
    "weight.txt": "0 1\n1 0 heavy\n",
    "round.txt": "0 1 1 -1\n",
    "double.txt": "0 1\n1 0\n0 1\n",
    "empty.txt": "# nothing\n",
    "sums.txt": "0 1 0.7\n0 2 0.7\n",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_the_place(name: str, tmp_path: Path) -> None:
    with refused(ConfigError):
        from_text(BAD[name], tmp_path / name)


def test_other_bad_graphs_are_refused(tmp_path: Path) -> None:
    with refused(ConfigError, key="topology.path"):
        GraphTopology()
    with refused(ConfigError, key="topology.path"):
        GraphTopology(path=str(tmp_path / "missing.csv"))
    with refused(ConfigError, key="topology.path"):
        GraphTopology(np.zeros((2, 3)))
    with refused(ConfigError, key="topology.path"):
        GraphTopology([["a", "b"], ["c", "d"]])
    with refused(ConfigError, key="topology.path"):
        GraphTopology(7)
    with refused(ConfigError, key="topology.path"):
        GraphTopology([[[0, 1], [1, 0]], [[0, float("nan")], [1, 0]]])
    with refused(ConfigError, key="topology.path"):
        GraphTopology(networkx.MultiDiGraph([(0, 1), (0, 1)]))
    with refused(ConfigError, key="topology"):
        GraphTopology([networkx.path_graph(2), [[0, 1], [1, 0]]])
    objects = np.array([{"code": "runs when it is unpickled"}, None])
    np.save(tmp_path / "pickle.npy", objects, allow_pickle=True)
    with refused(ConfigError, key="topology.path"):
        GraphTopology(path=str(tmp_path / "pickle.npy"))


@pytest.mark.parametrize("text", ["0 1\n1 7\n", "0 1\n001 0\n"])
def test_numbers_that_do_not_fit_the_peers_are_refused(text: str, tmp_path: Path) -> None:
    with refused(ConfigError, key="topology.path"):
        from_text(text, tmp_path / "edges.txt").check_roster(THREE)


def net() -> nn.Module:
    return nn.Linear(2, 2)


def peers(count: int) -> list[Any]:
    rng = torch.Generator().manual_seed(0)
    data = []
    for _ in range(count):
        x = torch.randn(12, 2, generator=rng)
        y = (x[:, 0] > 0).long()
        data.append(((x[:8], y[:8]), (x[8:], y[8:])))
    return data


def federation(topology: Any, method: Any = "dpsgd", count: int = 3, **settings: Any) -> Federation:
    defaults: dict[str, Any] = {"rounds": 2, "train": Train(epochs=1), "workers": 1}
    return Federation(net, peers(count), method, topology, **{**defaults, **settings})


def digests(run: Run) -> list[str]:
    return list(run.summary["weights_sha256"])


def test_a_ring_from_a_matrix_gives_the_models_of_the_ring() -> None:
    ring = digests(federation(Ring(), count=4).run())
    matrix = np.roll(np.eye(4), 1, axis=1) + np.roll(np.eye(4), -1, axis=1)
    assert digests(federation(matrix, count=4).run()) == ring
    assert digests(federation(networkx.cycle_graph(4), count=4).run()) == ring
    assert digests(federation([matrix, matrix], count=4).run()) == ring


def mixed(topology: Any, method: Any) -> list[Tensor]:
    """Every peer's weights after one round in which nothing is learned."""
    run = federation(topology, method, rounds=2, train=Train(lr=1e-30, weight_decay=0)).run()
    return [torch.cat([p.flatten() for p in run.model(k).parameters()]) for k in range(3)]


class Apart(DPSGD):
    """D-PSGD whose peers start from different weights, and are evaluated with their own."""

    evaluates_global: ClassVar[bool] = False

    @property
    def independent_init(self) -> bool:
        return True


class DisPFLApart(DisPFL):
    """Dis-PFL whose peers start from different weights."""

    first_weights: Any = "own"


def test_d_psgd_averages_by_the_weights_of_the_graph() -> None:
    """w = sum_j p_kj w_j: with P from two rounds, the models are P P times the first ones."""
    first = torch.stack(mixed(np.zeros((3, 3)), Apart()))
    P = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.4, 0.0], [0.0, 0.0, 1.0]])
    assert torch.allclose(torch.stack(mixed(WEIGHTED, Apart())), P @ P @ first)


def test_weights_that_do_not_add_up_to_1_are_divided_by_their_sum() -> None:
    scaled = WEIGHTED * [[3.0], [1.0], [1.0]]
    scaled_models = torch.stack(mixed(scaled, Apart()))
    assert torch.allclose(scaled_models, torch.stack(mixed(WEIGHTED, Apart())))


def test_without_weights_only_the_edges_count() -> None:
    plain = torch.stack(mixed(WEIGHTED > 0, Apart()))
    assert torch.equal(torch.stack(mixed(GraphTopology(WEIGHTED, weights=False), Apart())), plain)


def test_dis_pfl_weighs_the_models_that_hold_a_weight() -> None:
    """(a m_1 w_1 + b m_2 w_2) / (a m_1 + b m_2) under our mask, by hand for one step."""
    context = tiny_context(DisPFLApart(density=0.5, alpha_0=0), 3, topology=GraphTopology(WEIGHTED))
    states = initial_states(context)
    models = [states[name].model for name in THREE]
    weights, masks = zip(*(model.unpack() for model in models), strict=True)
    a = torch.tensor([0.5, 0.25, 0.25])[:, None]
    total = (a * torch.stack(weights)).sum(0)
    holders = (a * torch.stack(masks)).sum(0)
    m_0 = masks[0]
    by_hand = torch.where(m_0, total / holders.clamp(min=1e-9), 0.0)
    average = states["000"].next_mask.average(
        models, lambda: context.first_weights, [0.5, 0.25, 0.25]
    )
    assert torch.allclose(average, by_hand, atol=1e-7)
    assert torch.equal(average, average_of(models, m_0, [0.5, 0.25, 0.25]))


@pytest.mark.parametrize("structure", ["weights", "channels"])
def test_equal_weights_give_the_plain_average(structure: Any) -> None:
    method = DisPFL(density=0.5, structure=structure)
    context = tiny_context(method, 3)
    states = initial_states(context)
    models = [states[name].model for name in context.roster]
    mask = states["000"].next_mask
    plain = mask.average(models, lambda: context.first_weights)
    weighted = mask.average(models, lambda: context.first_weights, [2.0, 2.0, 2.0])
    assert torch.allclose(weighted, plain, atol=1e-7)
    own = mask.average(models, lambda: context.first_weights, [1.0, 0.0, 0.0])
    assert torch.allclose(own, models[0].flat())


def test_weights_are_refused_where_they_would_be_ignored() -> None:
    with refused(ConfigError, key="method.robust"):
        federation(WEIGHTED, DisPFL(robust="clip", byzantine=0))
    with refused(ConfigError, key="topology.weights"):
        federation(WEIGHTED, FedFOMO())
    federation(WEIGHTED, "local")
    federation(GraphTopology(WEIGHTED, weights=False), FedFOMO())


def test_a_size_that_does_not_fit_is_refused_before_anything_runs() -> None:
    with refused(ConfigError, key="topology.path"):
        federation(STAR, count=4)


def test_a_run_resumes_with_the_same_graph_only(tmp_path: Path) -> None:
    def stop(run: Run) -> None:
        raise StopRun

    out = tmp_path / "run"
    federation(WEIGHTED).run(out, callbacks=[stop])
    with pytest.raises(ConfigError, match="was run with topology"):
        federation(STAR).run(out, resume=True)
    resumed = federation(WEIGHTED).run(out, resume=True)
    assert digests(resumed) == digests(federation(WEIGHTED).run())


def test_a_changed_file_is_refused_on_resume_and_a_relative_path_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ring.txt").write_text("0 1\n1 0\n")
    small = ["peers=2", "rounds=1", "model=mlp", "partition.samples_per_peer=20"]
    experiment = compose({}, [*small, "topology=file", "topology.path=ring.txt"])
    experiment.run(tmp_path / "run")
    config = read_config(tmp_path / "run")
    assert config["topology"]["path"] == str(tmp_path / "ring.txt")

    os.chdir("/")
    assert compose(config).topology == experiment.topology
    (tmp_path / "ring.txt").write_text("1 0\n0 1\n")  # the same edges
    compose(config)
    (tmp_path / "ring.txt").write_text("0 1\n")
    with refused(ConfigError, key="topology.digest"):
        compose(config)


def test_sites_compare_the_graph_and_not_where_its_file_is(tmp_path: Path) -> None:
    def spec(text: str, path: Path) -> dict[str, str]:
        context = tiny_context(DisPFL(), 3, topology=from_text(text, path))
        return federation_spec("test", context, context.layout, context.first_weights, 0.5)

    here = spec("a b\nb c\n", tmp_path / "here.txt")
    assert spec_difference(here, spec("b c\na b\n", tmp_path / "elsewhere.txt")) is None
    difference = spec_difference(here, spec("a b\nc b\n", tmp_path / "elsewhere.txt"))
    assert difference is not None
    assert difference.startswith("topology.digest is ")


def test_a_site_reads_a_relative_path_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text("a b\n")
    values = {"topology": {"name": "file", "path": "graph.txt"}}
    config = SiteConfig.from_values(values, tmp_path)
    assert config.topology.row(0, 0, ["a", "b"], "a") == (["b"], [])
    assert "digest" not in config.to_toml()["topology"]
