"""The Python API with a user's own network and data."""

import json
import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dispfl
from dispfl import (
    Dirichlet,
    DisPFL,
    Experiment,
    Federation,
    Full,
    Local,
    RandomRegular,
    Ring,
    Run,
    Train,
    Wire,
    load_dataset,
    stream,
)
from dispfl.config import compose
from dispfl.core.metric import Metric, accuracy
from dispfl.errors import ConfigError, DataError, RunError
from dispfl.robust.attacks import Attack
from dispfl.runs.directory import read_config, read_summary
from dispfl.runs.prepare import experiment_context, split_dataset
from dispfl.topology import peer_names

Points = Callable[[int, int], tuple[Tensor, Tensor]]
Pair = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
QUICK = Train(epochs=1, batch_size=8)


class MyNet(nn.Module):
    """A user's network for tabular data."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.hidden(x).relu())
        return outputs


class TenfoldNet(MyNet):
    """The same with inputs that are multiplied, and may become infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(10 * x)


class BatchNormNet(MyNet):
    """The same with a batch norm, which has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.fixture
def pairs(points: Points) -> list[Pair]:
    """Six peers' own training and test data."""
    return [(points(20, k), points(10, 100 + k)) for k in range(6)]


def bits(run: Run) -> list[str]:
    digests: list[str] = run.summary["weights_sha256"]
    return digests


def test_the_ten_line_example(pairs: list[Pair]) -> None:
    fed = Federation(
        model=MyNet,
        peers=pairs,
        method=DisPFL(density=0.5),
        topology=RandomRegular(degree=4),
        train=Train(batch_size=8),
        seed=0,
        rounds=20,
    )
    run = fed.run()
    assert len(run.accuracy) == 6
    assert sum(run.accuracy) / 6 > 0.6  # three classes: far better than guessing
    assert run.model(3)(torch.zeros(2, 4)).shape == (2, 3)
    assert [record["round"] for record in run.metrics] == list(range(20))


def test_a_peers_model_has_the_accuracy_of_the_run(pairs: list[Pair]) -> None:
    run = Federation(MyNet, pairs, train=QUICK, rounds=2).run()
    for k, (_, (inputs, labels)) in enumerate(pairs):
        assert accuracy(run.model(k)(inputs), labels) == run.accuracy[k]
        assert run.model(f"00{k}")(inputs).equal(run.model(k)(inputs))


def test_a_peers_model_is_sparse_and_a_new_module(pairs: list[Pair]) -> None:
    run = Federation(MyNet, pairs, DisPFL(density=0.5), train=QUICK, rounds=1).run()
    model = run.model(0)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    weights = nn.utils.parameters_to_vector(model.parameters())
    assert weights.count_nonzero() <= run.states["000"].model.mask.kept < 67 * 0.55
    with torch.no_grad():
        weights.zero_()
        for parameter in model.parameters():
            parameter.zero_()
    assert run.model(0)(torch.ones(1, 4)).count_nonzero() == 3


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A user's own Dataset over the same rows."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.inputs[row], self.labels[row]


def test_tensors_tensor_datasets_and_datasets_of_the_same_rows_give_the_same_models(
    pairs: list[Pair],
) -> None:
    given: list[list[Any]] = [
        [*pairs],
        [(TensorDataset(*train), TensorDataset(*test)) for train, test in pairs],
        [(Rows(*train), Rows(*test)) for train, test in pairs],
        [(Rows(*train), test) for train, test in pairs],
    ]
    results = [bits(Federation(MyNet, peers, train=QUICK, rounds=1).run()) for peers in given]
    assert results[0] == results[1] == results[2] == results[3]


class ImageNet(nn.Module):
    """A convolution and a `view`, as in many a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(4 * 4 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        outputs: Tensor = self.linear(x.view(x.size(0), -1))
        return outputs


def test_images_and_a_network_that_flattens_with_view() -> None:
    images = [(torch.randn(9, 3, 6, 6), torch.arange(9) % 2) for _ in range(4)]
    run = Federation(
        ImageNet, [(images[0], images[1]), (images[2], images[3])], train=QUICK, rounds=1
    ).run()
    assert len(run.accuracy) == 2


def test_regression_with_a_custom_loss_and_metric() -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])

    def rmse(outputs: Tensor, targets: Tensor) -> float:
        return (outputs - targets).square().mean().sqrt().item()

    fed = Federation(
        lambda: nn.Linear(4, 1),
        [((inputs[:20], targets[:20]), (inputs[20:], targets[20:]))] * 2,
        DisPFL(density=1.0),
        train=Train(batch_size=8, lr=0.05),
        loss=nn.functional.mse_loss,
        metric=rmse,
        rounds=10,
    )
    run = fed.run()
    assert max(run.scores["rmse"]) < 0.3  # the targets' own deviation is about 3.8
    assert rmse(run.model(0)(inputs[20:]), targets[20:]) == pytest.approx(run.scores["rmse"][0])


@pytest.mark.parametrize("as_state_dict", [False, True])
def test_all_peers_start_from_init_which_is_not_modified(
    pairs: list[Pair], as_state_dict: bool
) -> None:
    given = MyNet()
    before = deepcopy(given.state_dict())
    init = given.state_dict() if as_state_dict else given
    fed = Federation(
        MyNet, pairs, Local(), train=Train(epochs=1, lr=1e-9, weight_decay=0), init=init, rounds=1
    )
    weights = fed.run().model(5).state_dict()
    for name, tensor in before.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=0)
        assert given.state_dict()[name].equal(tensor)


def test_init_with_buffers_starts_every_peer_from_those_buffers(pairs: list[Pair]) -> None:
    init = BatchNormNet().state_dict() | {"norm.num_batches_tracked": torch.tensor(1000)}
    with pytest.warns(UserWarning, match="buffers"):
        run = Federation(BatchNormNet, pairs, init=init, train=QUICK, rounds=1).run()
    assert (
        run.states["003"].buffers["norm.num_batches_tracked"] == 1000 + 3
    )  # batches of 8, 8 and 4


@pytest.mark.parametrize("wrong", [nn.Linear(4, 3), {"hidden.weight": torch.zeros(8, 4)}, {}])
def test_an_init_that_does_not_fit_is_refused_at_once(pairs: list[Pair], wrong: Any) -> None:
    with refused(ConfigError, key="init"):
        Federation(MyNet, pairs, init=wrong)


def test_callbacks_are_called_after_every_round(pairs: list[Pair]) -> None:
    rounds: list[int] = []
    fed = Federation(MyNet, pairs, train=QUICK, rounds=3)
    fed.run(callbacks=[lambda run: rounds.append(run.metrics[-1]["round"])])
    assert rounds == [0, 1, 2]


def test_a_run_directory_has_the_metrics_and_the_summary_of_the_run(
    pairs: list[Pair], tmp_path: Path
) -> None:
    federation = Federation(MyNet, pairs, train=QUICK, rounds=2)
    run = federation.run(tmp_path / "run")
    assert run.out == tmp_path / "run"
    lines = (run.out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(run.metrics)
    assert json.loads((run.out / "summary.json").read_text())["weights_sha256"] == bits(run)
    assert (run.out / "learning-curve.png").stat().st_size > 0
    assert bits(run) == bits(federation.run())
    assert Federation(MyNet, pairs, train=QUICK, rounds=1).run().out is None


def test_a_stopped_run_resumes_to_the_same_models(pairs: list[Pair], tmp_path: Path) -> None:
    def stop(run: Run) -> None:
        if len(run.metrics) == 2:
            raise KeyboardInterrupt

    whole = Federation(MyNet, pairs, train=QUICK, rounds=4).run()
    fed = Federation(MyNet, pairs, train=QUICK, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        fed.run(tmp_path / "run", callbacks=[stop])
    resumed = fed.run(tmp_path / "run", resume=True)
    assert bits(resumed) == bits(whole)
    assert [record["round"] for record in resumed.metrics] == [0, 1, 2, 3]


def test_a_script_may_always_resume(pairs: list[Pair], tmp_path: Path) -> None:
    first, again = (
        Federation(MyNet, pairs, train=QUICK, rounds=1).run(out=tmp_path / "run", resume=True)
        for _ in range(2)
    )
    assert bits(again) == bits(first)


def test_resuming_with_other_settings_or_without_a_directory_is_refused(
    pairs: list[Pair], tmp_path: Path
) -> None:
    Federation(MyNet, pairs, train=QUICK, rounds=1).run(out=tmp_path / "run")
    with refused(ConfigError, key="seed"):
        Federation(MyNet, pairs, train=QUICK, seed=1, rounds=1).run(
            out=tmp_path / "run", resume=True
        )
    with refused(ConfigError, key="rounds"):
        Federation(MyNet, pairs, train=QUICK, rounds=2).run(out=tmp_path / "run", resume=True)
    with refused(ConfigError, key="out"):
        Federation(MyNet, pairs, train=QUICK, rounds=1).run(resume=True)
    with refused(RunError):
        Federation(MyNet, pairs, train=QUICK, rounds=1).run(out=tmp_path / "run")


def test_an_error_in_a_users_network_unlocks_the_run_directory(
    pairs: list[Pair], tmp_path: Path
) -> None:
    switch = {"broken": True}

    class Sometimes(MyNet):
        def forward(self, x: Tensor) -> Tensor:
            if switch["broken"] and torch.is_grad_enabled():
                raise ZeroDivisionError("mine")
            return super().forward(x)

    fed = Federation(Sometimes, pairs, train=QUICK, rounds=1)
    with pytest.raises(RunError, match=r"Sometimes\.forward .* raised ZeroDivisionError: mine"):
        fed.run(tmp_path / "run")
    switch["broken"] = False
    assert len(fed.run(tmp_path / "run", resume=True).accuracy) == 6


def test_batch_norm_works_warns_once_and_its_buffers_stay_with_the_peer(pairs: list[Pair]) -> None:
    with pytest.warns(UserWarning, match="They stay with each peer and are not averaged") as warned:
        run = Federation(BatchNormNet, pairs, topology=Full(), train=QUICK, rounds=2).run()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    means = [run.states[peer].buffers["norm.running_mean"] for peer in run.states]
    assert len({tuple(mean.tolist()) for mean in means}) == 6
    for k, (_, (inputs, labels)) in enumerate(pairs):
        assert accuracy(run.model(k)(inputs), labels) == run.accuracy[k]
        assert run.model(k).state_dict()["norm.running_mean"].equal(means[k])


def test_buffers_are_averaged_over_the_models_heard_on_request(pairs: list[Pair]) -> None:
    """Each round of training moves a running mean by a tenth of its way for each of three batches.

    So after a round that begins with the average a of all peers' running means, two peers differ as
    if both had begun with a; and messages have 8 more values: four means and four variances.
    """
    fed = {
        average: Federation(
            BatchNormNet,
            pairs,
            "dpsgd",
            "full",
            rounds=1 + average,
            train=QUICK,
            workers=1,
            average_buffers=average,
        )
        for average in (False, True)
    }
    with pytest.warns(UserWarning, match="average_buffers=True averages them"):
        local = fed[False].run()
    averaged = fed[True].run()  # without the warning, which would be an error
    start = [local.states[peer].buffers["norm.running_mean"] for peer in local.states]
    common = torch.stack(start).mean(0)
    for k, ((inputs, _), _) in enumerate(pairs):
        buffers = averaged.states[f"00{k}"].buffers
        assert buffers["norm.num_batches_tracked"] == 6
        rng = stream(0, "batches", f"00{k}", 1)
        expected = common
        for rows in torch.randperm(20, generator=rng).split(8):
            expected = 0.9 * expected + 0.1 * inputs[rows].mean(0)
        torch.testing.assert_close(buffers["norm.running_mean"], expected)
    without, having = (run.metrics[0]["busiest"] for run in (local, averaged))
    for key in ("paper_mb", "wire_mb"):
        assert having[key] - without[key] == pytest.approx(5 * 8 * 4 / 1e6, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"method": "fedavg"},
            (
                "average_buffers averages over the neighbours that a peer receives from; method"
                " fedavg has none"
            ),
        ),
        (
            {"method": "local"},
            (
                "average_buffers averages over the neighbours that a peer receives from; method"
                " local has none"
            ),
        ),
        ({"method": {"structure": "channels"}}, "average_buffers needs method.structure=weights"),
        ({"engine": "ray"}, "average_buffers needs engine=inprocess, got engine=ray"),
    ],
)
def test_buffers_that_cannot_be_averaged_are_refused(
    pairs: list[Pair], changes: Any, sentence: str
) -> None:
    for attempt in (
        lambda: Federation(BatchNormNet, pairs, average_buffers=True, **changes),
        lambda: Experiment(average_buffers=True, **changes),
    ):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_random_state_and_thread_count_are_restored(
    pairs: list[Pair], threads: int
) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(123)
    given = MyNet()
    before = torch.get_rng_state()
    run = Federation(
        lambda: nn.Sequential(MyNet(), nn.Dropout(0.1)),
        pairs,
        train=QUICK,
        workers=threads,
        seed=4,
        rounds=1,
    ).run()
    run.model(0)
    Federation(MyNet, pairs, init=given)
    assert torch.get_rng_state().equal(before)
    assert torch.get_num_threads() == 2


def test_the_callers_random_state_and_thread_count_are_restored_after_an_error(
    pairs: list[Pair],
) -> None:
    def stop(run: Run) -> None:
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        Federation(MyNet, pairs, train=QUICK, workers=1, rounds=2).run(callbacks=[stop])
    assert torch.get_rng_state().equal(before)
    assert torch.get_num_threads() == 2


def test_a_peer_whose_steps_fail_is_named_and_the_run_finishes(
    pairs: list[Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (inputs, labels), test = pairs[2]
    pairs[2] = ((torch.full_like(inputs, 3e38), labels), test)
    with caplog.at_level(logging.WARNING, "dispfl"):
        run = Federation(TenfoldNet, pairs, train=QUICK, rounds=2).run(out=tmp_path / "run")
    for t, record in enumerate(run.metrics):
        assert list(record["failures"]) == ["002"]
        assert record["failures"]["002"].startswith(
            f"Peer 002, round {t}: the training loss became infinite or nan"
        )
        assert record["train_loss"]["per_peer"][2] is None
    assert len(caplog.messages) == 2
    assert run.summary["failures"] == 2
    assert run.summary["failed_peers"] == ["002"]
    assert len(run.accuracy) == 6


def test_a_single_peer_is_a_federation_too(pairs: list[Pair]) -> None:
    run = Federation(MyNet, pairs[:1], train=QUICK, rounds=2).run()
    assert len(run.accuracy) == 1
    assert run.metrics[0]["busiest"] == {
        "paper_mb": 0,
        "wire_mb": 0,
        "wire_up_mb": 0,
        "wire_down_mb": 0,
        "peer": None,
        "connections": 0,
    }


def test_without_a_topology_peers_receive_from_four_others(pairs: list[Pair]) -> None:
    kept = 4 * Federation(MyNet, pairs, train=QUICK, rounds=1).run().states["000"].model.mask.kept
    busiest = Federation(MyNet, pairs, train=QUICK, rounds=1).run().metrics[0]["busiest"]
    assert busiest["paper_mb"] == pytest.approx(4 * kept / 1e6)


def test_the_default_degree_is_at_most_the_number_of_other_peers(pairs: list[Pair]) -> None:
    topology = RandomRegular(offline_prob=0.25)
    run = Federation(MyNet, pairs[:3], topology=topology, train=QUICK, rounds=1).run()
    assert run.config["topology"] == RandomRegular(degree=2, offline_prob=0.25).model_dump()


def test_invalid_arguments_are_refused_with_a_sentence(pairs: list[Pair]) -> None:
    inputs, labels = pairs[0][0]
    empty = (inputs[:0], labels[:0])
    refusals: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (
            ConfigError,
            "A federation needs at least one peer; `peers` is empty.",
            lambda: Federation(MyNet, []),
        ),
        (
            DataError,
            "Peer 001's training data is empty",
            lambda: Federation(MyNet, [pairs[0], (empty, pairs[0][1])]),
        ),
        (
            DataError,
            "Peer 000's test data is empty",
            lambda: Federation(MyNet, [(pairs[0][0], empty)]),
        ),
        (
            DataError,
            "Peer 000's training data has 20 inputs but 19 labels",
            lambda: Federation(MyNet, [((inputs, labels[1:]), pairs[0][1])]),
        ),
        (ConfigError, r"peers\[1\] must be a pair", lambda: Federation(MyNet, [pairs[0], 3])),  # type: ignore[list-item]
        (
            ConfigError,
            r"topology\.degree must be below",
            lambda: Federation(MyNet, pairs, topology=RandomRegular(degree=6)),
        ),
        (
            ConfigError,
            "lists 7 groups for 6 peers",
            lambda: Federation(MyNet, pairs, DisPFL(density=(0.5,) * 7)),
        ),
        (
            ConfigError,
            "rounds must be at least 1, got 0",
            lambda: Federation(MyNet, pairs, rounds=0).run(),
        ),
        (
            ConfigError,
            "eval_every must be at least 1, got 0",
            lambda: Federation(MyNet, pairs, eval_every=0),
        ),
        (
            ConfigError,
            "workers must be at least 1, got -1",
            lambda: Federation(MyNet, pairs, workers=-1),
        ),
    ]
    for kind, sentence, attempt in refusals:
        with pytest.raises(kind, match=sentence):
            attempt()


def test_rounds_may_be_a_numpy_integer(pairs: list[Pair]) -> None:
    run = Federation(MyNet, pairs, topology=Ring(), train=QUICK, rounds=np.int64(2)).run()  # type: ignore[arg-type]
    assert len(run.metrics) == 2


def test_a_model_that_does_not_return_new_modules_is_refused(pairs: list[Pair]) -> None:
    with refused(ConfigError, key="model"):
        Federation(model=MyNet(), peers=pairs)  # type: ignore[arg-type]
    with refused(ConfigError, key="model"):
        Federation(model=torch.nn.Linear(2, 2), peers=pairs)  # type: ignore[arg-type]
    net = MyNet()
    with refused(ConfigError):
        Federation(model=lambda: net, peers=pairs, train=QUICK, rounds=1).run()
    with refused(ConfigError):
        Federation(model=lambda: nn.LazyLinear(3), peers=pairs, train=QUICK, rounds=1).run()


def test_a_copy_of_a_trained_module_may_be_a_model(pairs: list[Pair]) -> None:
    trained = Federation(model=MyNet, peers=pairs, train=QUICK, rounds=1).run().model(0)
    trained(torch.zeros(1, 4)).sum().backward()
    run = Federation(model=lambda: deepcopy(trained), peers=pairs, train=QUICK, rounds=1).run()
    assert len(run.accuracy) == 6


def test_a_nan_score_is_left_out_of_the_mean(pairs: list[Pair], tmp_path: Path) -> None:
    scores = iter([0.5, float("nan"), 1.0, float("inf"), 0.0, 0.5])
    metric = Metric(lambda *_: next(scores), "luck", higher_is_better=True)
    fed = Federation(
        model=MyNet, peers=pairs, method=Local(), train=QUICK, metric=metric, workers=1, rounds=1
    )
    run = fed.run(out=tmp_path / "run")
    assert run.scores["luck"] == [0.5, None, 1.0, None, 0.0, 0.5]
    assert run.summary["scores"]["luck"]["mean"] == 0.5


class Counting(MyNet):
    """Counts its batches in a buffer that is not saved with it, and uses the count."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return super().forward(x + self.count)


@pytest.mark.filterwarnings("ignore:The model has buffers")
def test_non_persistent_buffers_stay_with_the_peer_too(pairs: list[Pair]) -> None:
    fed = [
        Federation(model=Counting, peers=pairs, train=QUICK, workers=threads, rounds=2)
        for threads in (1, 2)
    ]
    one, two = (federation.run() for federation in fed)
    assert bits(one) == bits(two)
    assert one.states["003"].buffers["count"] == 2 * 3  # rounds x batches of 8 out of 20 rows


def test_an_unknown_peer_is_refused_and_a_numpy_seed_is_the_same_seed(pairs: list[Pair]) -> None:
    run = Federation(model=MyNet, peers=pairs, train=QUICK, seed=7, rounds=1).run()
    seed: int = np.int64(7)  # type: ignore[assignment]
    assert bits(run) == bits(
        Federation(model=MyNet, peers=pairs, train=QUICK, seed=seed, rounds=1).run()
    )
    for peer in (6, -7, "alice"):
        with pytest.raises(ConfigError, match=f"no peer {peer}; there are 6, from 000 to 005"):
            run.model(peer)


def test_a_run_of_another_model_or_other_data_is_not_resumed(
    pairs: list[Pair], tmp_path: Path
) -> None:
    Federation(model=MyNet, peers=pairs, train=QUICK, rounds=1).run(out=tmp_path / "run")
    for other, sentence in (
        (
            Federation(model=lambda: nn.Linear(4, 3), peers=pairs, train=QUICK, rounds=1),
            "was run with initial_weights_sha256 = ",
        ),
        (
            Federation(
                model=MyNet,
                peers=[((pairs[0][0][0][1:], pairs[0][0][1][1:]), pairs[0][1]), *pairs[1:]],
                train=QUICK,
                rounds=1,
            ),
            "data are not those that",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            other.run(out=tmp_path / "run", resume=True)


def test_the_command_line_refuses_to_resume_a_run_made_in_python(
    pairs: list[Pair], tmp_path: Path
) -> None:
    Federation(model=MyNet, peers=pairs, train=QUICK, rounds=1).run(out=tmp_path / "run")
    with refused(ConfigError):
        compose(read_config(tmp_path / "run"))


def test_an_unavailable_device_is_refused_at_once(pairs: list[Pair]) -> None:
    with refused(ConfigError, key="device"):
        Federation(model=MyNet, peers=pairs, device="abacus")


def test_a_data_set_divided_by_a_partition_is_a_federations_peers(tmp_path: Path) -> None:
    """Two lines give the models of an experiment with the same seed and settings."""
    overrides = ["peers=4", "rounds=1", "topology=full", "model=mlp", "workers=1", "seed=3"]
    overrides += ["partition.samples_per_peer=24", "partition.test_samples_per_peer=10"]
    experiment = compose({}, overrides)
    expected = experiment.run(tmp_path / "run")

    data = load_dataset("fashion-sample")
    peers = Dirichlet(alpha=0.3, samples_per_peer=24, test_samples_per_peer=10).peers(
        data, 4, seed=3
    )
    model = experiment_context(experiment, data, split_dataset(experiment, data)).model
    run = Federation(
        model, peers, topology=Full(), train=experiment.train, workers=1, seed=3, rounds=1
    ).run()
    assert [len(train) for train, _ in peers] == [24] * 4
    assert [len(test) for _, test in peers] == [10] * 4
    assert bits(run) == bits(expected)


@pytest.mark.parametrize("engine", ["Ray", "threads", None])
def test_an_unknown_engine_is_refused(pairs: list[Pair], engine: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Federation(MyNet, pairs, engine=engine)
    assert str(caught.value) == f"engine must be 'inprocess' or 'ray', got {engine!r}."


def test_a_run_is_finished_before_its_learning_curve_is_drawn(
    pairs: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(paths: object, to: object) -> None:
        raise ZeroDivisionError("cannot draw")

    path = tmp_path / "run"
    monkeypatch.setattr("dispfl.report.plots.plot_runs", fail)
    with pytest.raises(ZeroDivisionError, match="cannot draw"):
        Federation(MyNet, pairs, train=QUICK, workers=1, rounds=1).run(out=path)
    summary = read_summary(path)
    assert summary is not None
    assert summary["rounds"] == 1
    assert not (path / "learning-curve.png").exists()


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("method", DisPFL, "method must be a name or a table, got <class"),
        ("method", Ring(), "method must be a name, a table or a Method, got Ring"),
        ("topology", 3, "topology must be a name or a table, got 3."),
        ("train", "sgd", "train must be a table, got 'sgd'."),
        ("method", "dispfll", "method 'dispfll' does not exist. Did you mean dispfl?"),
        ("topology", {"name": "rign"}, "topology 'rign' does not exist. Did you mean ring?"),
        (
            "method",
            {"name": "dispfl", "density": 20},
            "method.density must be in (0, 1], got 20. To keep 20%",
        ),
        ("train", {"lerning_rate": 0.1}, "Unknown key train.lerning_rate"),
        (
            "method",
            "no_such_module:Mine",
            "method names the module no_such_module, which is neither in",
        ),
    ],
)
def test_an_argument_that_is_none_of_these_is_refused_by_name(
    points: Points, name: str, value: Any, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Federation(MyNet, [(points(8, 0), points(4, 1))], **{name: value})
    assert str(refused.value).startswith(sentence)


def test_names_references_and_dicts_are_the_objects_that_a_config_would_give(
    pairs: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_method.py").write_text(
        "import dispfl\n\n\nclass Mine(dispfl.Local):\n    pass\n"
    )
    named = Federation(
        MyNet,
        pairs,
        "dispfl",
        "ring",
        train={"epochs": 1, "batch_size": 8},
        wire={"values": "float16"},
        rounds=1,
    ).run()
    objects = Federation(
        MyNet, pairs, DisPFL(), Ring(), train=QUICK, wire=Wire(values="float16"), rounds=1
    ).run()
    assert bits(named) == bits(objects)
    assert named.config == objects.config
    settings = {"name": "dispfl", "density": 0.2}
    assert (
        Federation(MyNet, pairs, settings, {"degree": 3}, train=QUICK, rounds=1)
        .run()
        .config["method"]["density"]
        == 0.2
    )
    own = Federation(MyNet, pairs, "own_method:Mine", train=QUICK, rounds=1).run()
    assert bits(own) == bits(Federation(MyNet, pairs, Local(), train=QUICK, rounds=1).run())


def test_an_experiment_runs_with_and_without_a_directory_and_is_resumed_there(
    tmp_path: Path,
) -> None:
    tables: dict[str, Any] = {
        "model": "mlp",
        "method": "local",
        "partition": {"samples_per_peer": 16},
    }
    experiment = Experiment(peers=3, rounds=1, workers=1, train=QUICK, **tables)
    alone, saved = experiment.run(), experiment.run(tmp_path / "run")
    assert bits(alone) == bits(saved)
    assert (alone.out, saved.out) == (None, tmp_path / "run")
    assert alone.config == saved.config == read_config(tmp_path / "run")
    assert alone.split is not None
    assert saved.split is not None
    assert alone.split.train[2].equal(saved.split.train[2])
    assert bits(experiment.run(tmp_path / "run", resume=True)) == bits(alone)
    with refused(RunError):
        experiment.run(tmp_path / "run")
    with refused(ConfigError, key="out"):
        experiment.run(resume=True)


def test_a_label_beyond_the_outputs_is_refused_before_training(
    points: Points, tmp_path: Path
) -> None:
    (x, y), test = points(20, 0), points(10, 1)
    for peers, sentence in (
        (
            [((x, y), test), ((x, y + 2), test)],
            "Peer 001's training data have the label 4, but the model has 3 outputs, for",
        ),
        (
            [((x, y), (x, y), (x, y + 5))],
            "Peer 000's test data have the label 7, but the model has 3 outputs, for",
        ),
        (
            [((x, y - 1), test)],
            "Peer 000's training data have the label -1, but the model has 3 outputs, for",
        ),
        (
            [((x, y), (x, y + 1), (x, y))],
            "Peer 000's validation data have the label 3, but the model has 3 outputs, for",
        ),
    ):
        federation = Federation(MyNet, peers, Local(), Full(), train=QUICK, rounds=1)
        with pytest.raises(DataError) as refused:
            federation.run(out=tmp_path / "run")
        assert str(refused.value).startswith(sentence)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("attack", ["sign-flip", "label-flip", "backdoor", "adaptive-backdoor"])
def test_a_share_of_the_peers_lies_and_the_others_are_scored(
    pairs: list[Pair], attack: Any, tmp_path: Path
) -> None:
    """A third of six peers. The same two lie as with `attack=` of an experiment: they are picked by
    the seed."""
    fed = Federation(
        MyNet, pairs, "dpsgd", "full", train=QUICK, attack=attack, byzantine=0.34, seed=1, rounds=2
    )
    run = fed.run(out=tmp_path)
    byzantine = Attack.of(attack, 0.34, peer_names(6), 1).byzantine  # type: ignore[union-attr]
    scored = dict(
        zip(peer_names(6), run.metrics[-1]["scores"]["accuracy"]["per_peer"], strict=True)
    )
    assert {name for name, score in scored.items() if score is None} == byzantine
    assert len(byzantine) == 2
    assert (run.metrics[-1]["backdoor"] is not None) == attack.endswith("backdoor")
    honest = Federation(MyNet, pairs, "dpsgd", "full", train=QUICK, seed=1, rounds=2).run()
    assert set(bits(run)).isdisjoint(
        bits(honest)
    )  # all receive from all, so that a lie reaches everybody
    config = read_config(tmp_path)
    assert (config["attack"], round(6 * config["byzantine"])) == (attack, 2)
    loaded = Run.load(
        tmp_path, model=MyNet
    )  # the consensus of honest peers, and each Byzantine peer's own model
    for name in peer_names(6):
        assert loaded.personal[name].model.values.equal(run.personal[name].model.values)
        assert run.personal[name].model.values.equal(run.states[name].model.values) == (
            name in byzantine
        )
    assert len(run.summary["weights_sha256"]) == 6
    with refused(ConfigError):
        Federation(MyNet, pairs, "dpsgd", "full", train=QUICK, seed=1, rounds=2).run(
            out=tmp_path, resume=True
        )


@pytest.mark.parametrize(
    ("attack", "byzantine", "sentence"),
    [
        ("sing-flip", 0.2, "attack must be 'none', 'sign-flip', 'noise'"),
        ("noise", 2, "byzantine must be in [0, 1), got 2."),
        (
            "none",
            0.2,
            "byzantine is 0.2, but attack is none; name what these peers do: attack=sign-flip.",
        ),
        (
            "noise",
            0,
            "attack is noise, but byzantine is 0;"
            " give the share of Byzantine peers: byzantine=0.2.",
        ),
    ],
)
def test_a_wrong_attack_is_refused_in_a_sentence(
    pairs: list[Pair], attack: Any, byzantine: float, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Federation(MyNet, pairs, attack=attack, byzantine=byzantine)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"seed": 0.5}, "seed must be a whole number of at least 0, got 0.5."),
        ({"peers": 3}, "`peers` must be a list of pairs (training data, test data), got 3."),
        (
            {"peers": {0: 1}},
            "peers[0] must be a pair (training data, test data), or (training data, validation"
            " data, test data).",
        ),
    ],
)
def test_what_is_no_seed_and_no_list_of_peers_is_refused(
    pairs: list[Pair], wrong: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Federation(**{"model": MyNet, "peers": pairs, **wrong})
    assert str(refused.value) == sentence


def test_a_run_is_not_resumed_with_another_evaluation_of_training_data(
    pairs: list[Pair], tmp_path: Path
) -> None:
    Federation(MyNet, pairs, Local(), Full(), train=QUICK, rounds=1).run(out=tmp_path)
    with refused(ConfigError, key="eval_train"):
        Federation(MyNet, pairs, Local(), Full(), train=QUICK, eval_train=True, rounds=2).run(
            out=tmp_path, resume=True
        )


def test_a_federation_has_the_defaults_of_a_config_file(pairs: list[Pair]) -> None:
    ours = Federation(MyNet, pairs)._context.settings.to_toml()
    of_a_file = compose({"peers": len(pairs)}).to_toml()
    assert ours == {key: of_a_file[key] for key in ours}
    assert set(of_a_file) - set(ours) == {"data", "model", "partition"}


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("eval_evry", "Unknown key eval_evry. Did you mean eval_every?"),
        ("lr", "Unknown key lr. Did you mean train.lr?"),
        ("dataset", "Unknown key dataset."),
    ],
)
def test_an_unknown_keyword_is_refused_as_in_a_config_file(
    pairs: list[Pair], key: str, sentence: str
) -> None:
    unknown: dict[str, Any] = {key: 1}
    with pytest.raises(ConfigError) as refused:
        Federation(MyNet, pairs, **unknown)
    assert str(refused.value).startswith(sentence)
    assert refused.value.key == key


TINY = {"peers": 2, "topology": "full", "model": "mlp", "train": {"epochs": 1}, "workers": 1}


def test_a_config_file_is_run_with_one_call_and_keywords_override_it(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'peers = 2\nrounds = 7\ntopology = "full"\nmodel = "mlp"\n[train]\nepochs = 1\n'
    )
    run = dispfl.run(tmp_path / "my.toml", rounds=1, method="local", train={"lr": 0.01}, workers=1)
    assert len(run.metrics) == 1
    assert run.config["method"]["name"] == "local"
    assert run.config["train"]["lr"] == 0.01
    assert run.config["train"]["epochs"] == 1
    assert run.split is not None


def test_a_config_is_run_as_on_the_command_line(tmp_path: Path) -> None:
    called = dispfl.run(TINY, rounds=1, out=tmp_path / "run")
    composed = compose(TINY, ["rounds=1"]).run()
    assert called.summary["weights_sha256"] == composed.summary["weights_sha256"]
    resumed = dispfl.run(TINY, rounds=1, out=tmp_path / "run", resume=True)
    assert resumed.summary["weights_sha256"] == called.summary["weights_sha256"]
    with pytest.raises(ConfigError, match="Unknown key densty") as refused:
        dispfl.run(TINY, densty=0.2)
    assert refused.value.key == "densty"


def test_the_history_has_every_quantity_by_round(pairs: list[Pair]) -> None:
    run = Federation(MyNet, pairs, train=QUICK, rounds=3, eval_every=2).run()
    first, second, third = run.history["accuracy"]
    assert first is None
    assert [second, third] == [record["scores"]["accuracy"]["mean"] for record in run.metrics[1:]]
    assert run.history["round"] == [0, 1, 2]
    assert {len(values) for values in run.history.values()} == {3}
    for column in ("train_loss", "test_loss", "mask_change", "busiest.wire_mb", "seconds"):
        assert isinstance(run.history[column][1], float)
