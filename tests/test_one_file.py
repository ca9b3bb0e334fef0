"""`examples/dispfl_one_file.py` computes what the package computes, bit for bit."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dispfl import DisPFL, Federation, PackedModel, RandomRegular, Run, Train
from dispfl.runs.metrics import weights_sha256

EXAMPLE = Path(__file__).parent.parent / "examples" / "dispfl_one_file.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as a module, with one thread, as the package's workers have."""
    spec = importlib.util.spec_from_file_location("dispfl_one_file", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dispfl_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        yield module
    torch.set_num_threads(threads)
    del sys.modules["dispfl_one_file"]


def run_package(example: ModuleType, data: list, settings: object) -> Run:
    """Run the package with the example's network, data and settings."""
    given = vars(settings)
    train = {
        key: given[key]
        for key in ("epochs", "batch_size", "lr", "lr_decay", "weight_decay", "clip_norm")
    }
    federation = Federation(
        example.small_cnn,
        data,
        DisPFL(density=given["density"], alpha_0=given["alpha_0"]),
        RandomRegular(degree=given["degree"]),
        train=Train(**train),
        seed=given["seed"],
        rounds=given["rounds"],
    )
    return federation.run(progress=False)


@pytest.mark.parametrize("density", [0.5, 0.2])
def test_weights_masks_and_accuracies_are_those_of_the_package_bit_for_bit(
    example: ModuleType, density: float
) -> None:
    settings = example.Settings(seed=3, rounds=3, degree=2, epochs=2, density=density)
    data = example.dirichlet_split(peers=5, alpha=0.3, seed=3)
    run = run_package(example, data, settings)
    net = example.small_cnn()

    for t, peers in enumerate(example.dispfl(example.small_cnn, data, settings)):
        accuracies = [example.accuracy(net, peer) for peer in peers.values()]
        assert accuracies == run.metrics[t]["scores"]["accuracy"]["per_peer"]

    digests = [weights_sha256(PackedModel.pack(peer.w, peer.m)) for peer in peers.values()]
    assert digests == run.summary["weights_sha256"]
    for name, peer in peers.items():
        assert torch.equal(peer.next_m, run.states[name].next_mask.unpack())
        assert not torch.equal(peer.next_m, peer.m)


def test_the_split_gives_every_peer_its_own_images_and_label_shares(example: ModuleType) -> None:
    data = example.dirichlet_split(peers=16, alpha=0.3, seed=0)
    assert [len(train[1]) for train, _ in data] == [96] * 16
    assert [len(test[1]) for _, test in data] == [100] * 16
    images = torch.cat([train[0] for train, _ in data])
    assert (
        len(images.flatten(1).unique(dim=0)) > 1530
    )  # of 1,536: the data set itself has a few twins
    for (_, train_labels), (_, test_labels) in data:
        assert (
            train_labels.bincount(minlength=10).argmax() in test_labels.bincount().topk(3).indices
        )


def test_the_example_imports_nothing_but_torch_and_numpy() -> None:
    """And stays short enough to read in one sitting."""
    code = EXAMPLE.read_text()
    modules = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module))
    outside = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)
    assert outside == {"numpy", "torch"}
    assert len(code.splitlines()) <= 320
    assert max(map(len, code.splitlines())) <= 100
