"""What newcomers try first with models and data: each gets a sentence that says what to do."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refused
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from dispfl import Federation, Train
from dispfl.core.inputs import forward
from dispfl.errors import ConfigError, DataError, RunError

QUICK = Train(epochs=1, batch_size=8)


class Result(OrderedDict[str, Any]):
    """As the results of Hugging Face models: a dict whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Returning(nn.Module):
    """A network that wraps its outputs."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x))


def points(count: int = 12) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    return inputs, (inputs[:, 0] > 0).long()


def federation(wrap: Any = lambda x: x, pair: Any = None, **settings: Any) -> Federation:
    pair = pair or points()
    peers = [(pair, pair), (pair, pair)]
    return Federation(lambda: Returning(wrap), peers, train=QUICK, rounds=1, **settings)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, x),
        lambda x: {"out": x},
        lambda x: Result(last_hidden_state=x),
        lambda x: None,
    ],
    ids=["tuple", "dict", "without a head", "nothing"],
)
def test_a_model_that_returns_no_tensor_is_refused_before_anything_is_written(
    wrap: Any, tmp_path: Path
) -> None:
    with refused(ConfigError, key="model"):
        federation(wrap).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    federation().run(tmp_path / "run")


@pytest.mark.parametrize("wrap", [lambda x: Result(logits=x), lambda x: {"logits": x}])
def test_the_logits_of_a_result_are_its_outputs(wrap: Any) -> None:
    plain = federation().run()
    wrapped = federation(wrap).run()
    assert wrapped.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert wrapped.evaluate(0, points()) == plain.evaluate(0, points())


def test_one_hot_labels_are_refused_with_the_way_out() -> None:
    inputs, labels = points()
    for one_hot in (functional.one_hot(labels, 2), functional.one_hot(labels, 2).float()):
        with refused(DataError):
            federation(pair=(inputs, one_hot)).run()


def test_a_loss_that_would_compare_each_output_with_all_labels_is_refused() -> None:
    inputs, labels = points()
    pair = (inputs, labels.float())
    settings = {"loss": functional.mse_loss, "metric": "mse"}
    with refused(DataError):
        federation(lambda x: x[:, :1], pair, **settings).run()
    run = federation(lambda x: x[:, :1], pair, task="regression").run()
    assert list(run.scores) == ["rmse", "mae", "r2"]


def test_a_run_that_failed_before_its_first_result_does_not_refuse_the_second(
    tmp_path: Path,
) -> None:
    def broken(outputs: Tensor, labels: Tensor) -> float:
        raise ValueError("no such column")

    broken.__name__ = "broken_error"
    with pytest.raises(RunError, match="no such column"):
        federation(metric=broken).run(tmp_path / "run")
    run = federation().run(tmp_path / "run")
    assert run.summary["rounds"] == 1
    with pytest.raises(RunError, match="exists already"):
        federation().run(tmp_path / "run")  # now it has results


class Masked(nn.Module):
    """The mean of the numbers under a mask, as text models take their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Result:
        shares = attention_mask / attention_mask.sum(1, keepdim=True)
        mean = (self.embedding(input_ids) * shares[..., None]).sum(1)
        return Result(logits=self.linear(mean))


def sentences(count: int = 24) -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator().manual_seed(count)
    labels = torch.arange(count) % 2
    words = torch.randint(0, 5, (count, 6), generator=rng) + 5 * labels[:, None]
    lengths = torch.randint(1, 7, (count,), generator=rng)
    mask = (torch.arange(6) < lengths[:, None]).long()
    return {"input_ids": words * mask, "attention_mask": mask}, labels


class Sentences(Dataset[Any]):
    """The same, one by one."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> Any:
        inputs, labels = sentences()
        return {name: tensor[row] for name, tensor in inputs.items()}, int(labels[row])


@pytest.mark.parametrize("settings", [{}, {"vmap_peers": 2}, {"privacy": {"noise_multiplier": 1}}])
def test_inputs_may_be_a_dict_of_the_networks_arguments(settings: dict[str, Any]) -> None:
    peers: Any = [(sentences(), sentences()), (sentences(), sentences())]
    run = Federation(Masked, peers, "dispfl", "full", rounds=8, train={"lr": 0.5}, **settings).run()
    assert run.summary["failures"] == 0
    if not settings:
        assert min(run.accuracy) > 0.9
        lazy: Any = [(Sentences(), Sentences()), (sentences(), sentences())]
        same = Federation(Masked, lazy, "dispfl", "full", rounds=8, train={"lr": 0.5}).run()
        assert same.summary["weights_sha256"] == run.summary["weights_sha256"]
        assert run.evaluate(0, sentences()) == run.accuracy[0]
        assert run.summary["flops_per_peer_round"] > 0


def test_a_dict_batch_for_a_model_that_takes_a_tensor_is_refused_with_both_names() -> None:
    with refused(ConfigError, key="model"):
        federation(pair=sentences()).run()
    with refused(ConfigError, key="model"):
        forward(Masked(), {"input_ids": torch.zeros(1, 6), "token_type_ids": torch.zeros(1, 6)})
    inputs, labels = sentences()
    with refused(DataError):
        Federation(Masked, [((inputs, labels[:5]), sentences())])
