"""`dispfl costs`, as a table and as JSON, and beside the paper."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from dispfl.cli.costs import costs
from dispfl.config import compose, read_toml
from dispfl.errors import ConfigError, RunError
from dispfl.paper import printed_costs as paper_costs
from dispfl.runs.directory import read_metrics
from dispfl.runs.execute import ExperimentRun

app = typer.Typer()
app.command()(costs)

SMALL = ("model=cnn", "data=fashion-mnist")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})


def printed(*arguments: str) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout


def found(*arguments: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(printed(*arguments, "--json"))
    return parsed


def refusal(*arguments: str) -> str:
    problem = invoke(*arguments).exception
    assert isinstance(problem, ConfigError)
    return str(problem)


def test_a_narrow_terminal_folds_headings_and_cuts_nothing_off() -> None:
    text = CliRunner().invoke(app, list(SMALL), env={"COLUMNS": "60"}).stdout
    assert "…" not in text
    assert "as the paper " in text


def test_the_speed_of_this_machine_is_measured_as_a_device_of_a_clock() -> None:
    """The 20th part of what is measured is given as the speed of slower devices."""
    tiny = ["model=mlp", "data=fashion-mnist", "peers=2", "workers=1", "train.epochs=1"]
    tiny += ["topology=full", "partition.samples_per_peer=32", "classes.a={share=1, speed=1e9}"]
    text = " ".join(printed(*tiny, "--measure").split())
    measured = float(text.partition("this machine trains with ")[2].split()[0])
    slower = float(text.partition("have speed=")[2].split()[0])
    assert measured > 0
    assert slower == pytest.approx(measured / 20, rel=0.1)
    assert found(*tiny, "--measure")["measured_speed"] > 0
    assert "measured_speed" not in found(*tiny)


def test_the_defaults_are_the_papers() -> None:
    """105,962 parameters at density 0.5, 10 neighbours, 60,000 images over 100 peers."""
    costs = found(*SMALL)
    context = costs["setting"]
    assert (context["peers"], context["samples"], context["epochs"], context["batch"]) == (
        100,
        600,
        5,
        128,
    )
    assert (context["method"]["density"], context["topology"]["degree"]) == (0.5, 10)
    assert costs["parameters"] == 105_962
    assert costs["kept"] == sum(layer["kept"] for layer in costs["layers"])
    assert (
        costs["paper"]["busiest_mb"]
        == costs["paper"]["mean_mb"]
        == pytest.approx(costs["kept"] * 4 * 10 / 1e6)
    )
    assert costs["wire"]["busiest_down_mb"] < costs["paper"]["busiest_mb"]
    assert set(costs["wire"]) == {"busiest_up_mb", "busiest_down_mb", "mean_mb", "peers_drawn"}


def test_overrides_apply_and_a_ring_has_two_neighbours() -> None:
    costs = found(
        *SMALL, "peers=8", "topology=ring", "method=dpsgd", "partition.samples_per_peer=40"
    )
    assert costs["setting"]["samples"] == 40
    assert costs["paper"]["busiest_mb"] == pytest.approx(2 * 105_962 * 4 / 1e6)
    assert costs["paper"]["flops_per_peer_round"] == 3 * 5 * 40 * sum(
        x["forward_flops"] for x in costs["layers"]
    )


def test_the_table_has_a_line_per_layer_then_both_totals() -> None:
    text = printed(*SMALL, "method=dpsgd", "peers=20")
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith(
        "cnn on fashion-mnist (1x28x28, 10 classes), dpsgd, random; 20 peers with 3000 samples"
    )
    assert ["conv1.weight", "16x1x3x3", "1.000", "144", "56.45"] in lines
    assert ["norm1.bias", "16", "1.000", "16", "–"] in lines
    assert ["as", "the", "paper", "counts", "–", "4.24", "4.24"] in [line[:7] for line in lines]
    assert ["on", "the", "wire", "4.24", "4.24", "4.24"] in lines
    assert "all peers' masks drawn" in text


def test_groups_of_densities_have_a_separate_table() -> None:
    text = printed(*SMALL, "peers=4", "topology=full", "method.density=[0.5,1.0]")
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "2", "105,962"] in [line[:3] for line in lines]
    assert "mean over peers" in text


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("fedavg", "The busiest node is the server."),
        ("dpsgd-ft", "Fine-tuning before a model is evaluated is not charged"),
        ("subfedavg", "prunes as it trains"),
    ],
)
def test_the_output_names_what_is_not_counted(method: str, sentence: str) -> None:
    assert sentence in printed(*SMALL, "peers=12", f"method={method}")
    assert sentence not in printed(*SMALL, "peers=12")


def test_a_config_file_is_read_as_by_dispfl_run(tmp_path: Path) -> None:
    """Its defaults are the demo's: 16 peers, 96 samples, 4 neighbours, batch 32."""
    config = tmp_path / "mine.toml"
    config.write_text("peers = 8\n[method]\ndensity = 0.2\n")
    for given in (["-c", str(config)], [str(config)]):
        context = found(*given, "method.density=0.3")["setting"]
        assert (context["peers"], context["samples"], context["batch"]) == (8, 96, 32)
        assert (context["data"], context["method"]["density"]) == ("fashion-sample", 0.3)
    assert (
        refusal(str(config), "-c", "b.toml")
        == f"There are two config files, {config} and b.toml; give one of them."
    )


def test_a_config_made_in_python_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('made_in_python = true\nrounds = 1\n[method]\nname = "dispfl"\n')
    assert refusal("-c", str(config)).endswith(
        "a run made in Python; costs need a model and a data set by name."
    )


def test_more_samples_than_available_are_refused_with_a_sentence() -> None:
    sentence = refusal(*SMALL, "partition.samples_per_peer=601")
    assert (
        sentence
        == "partition.samples_per_peer is 601 but 60000 training samples give each of 100 peers at"
        " most 600; lower partition.samples_per_peer or peers."
    )


def test_a_typo_is_refused_with_the_nearest_key() -> None:
    assert refusal("method.densty=0.5") == "Unknown key method.densty. Did you mean method.density?"


def test_all_of_the_papers_numbers_agree_and_misprints_are_named() -> None:
    text = printed("--paper")
    assert "116 of 116 costs agree" in text
    assert "Table 9: Local is printed as 6.7." in text
    assert "Table 8: Dis-PFL on a ring has no FLOPs printed." in text
    assert max(len(line) for line in text.splitlines() if "%" in line and "agree" not in line) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert [
        "dispfl",
        "0.5",
        "random",
        "223.4",
        "223.48",
        "+0.04%",
        "7.0",
        "7.06",
        "+0.86%",
    ] in lines
    assert ["subfedavg", "?", "–", "278.8", "–", "trained", "4.7", "–", "trained"] in lines


def test_a_number_that_disagrees_is_marked_and_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        paper_costs, "TOLERANCE", 0.0
    )  # 45.8 against 45.92 is more than one last digit
    result = invoke("--paper")
    assert result.exit_code == 1
    assert "do not, marked with !" in result.stdout
    assert "+0.27% !" in result.stdout


def test_the_papers_numbers_as_json() -> None:
    parsed = found("--paper")
    assert parsed["verdicts"] == {"agrees": 116, "off": 0, "misprint": 2, "depends on training": 6}
    assert len(parsed["figures"]) == 124
    first = next(figure for figure in parsed["figures"] if figure["method"] == "dispfl")
    assert (first["table"], first["data"], first["figure"], first["paper"]) == (
        1,
        "cifar10",
        "busiest_mb",
        223.4,
    )
    assert first["ours"] == pytest.approx(223.479, abs=0.001)
    assert len(parsed["errata"]) == 2


def test_the_paper_and_settings_together_are_refused() -> None:
    assert refusal("--paper", "peers=10").startswith("--paper uses the settings of the paper")


def test_flops_are_counted_with_single_weights_and_saved_with_channels() -> None:
    weights, channels = (
        printed(*SMALL, "peers=12", f"method.structure={kind}") for kind in ("weights", "channels")
    )
    assert "counted: dense kernels do the work" in weights
    assert "saved" not in weights
    assert "saved: a peer trains the small network, which computes only these" in channels
    assert "counted" not in channels
    assert channels.startswith(
        "cnn on fashion-mnist (1x28x28, 10 classes), dispfl with masks of channels, random;"
    )
    assert [
        found(*SMALL, "peers=12", f"method.structure={k}")["flops"] for k in ("weights", "channels")
    ] == [
        "counted",
        "saved",
    ]


def test_with_channels_the_table_has_the_shapes_of_the_small_network() -> None:
    """conv2 keeps some of its 32 channels and of its 16 inputs; the product of both shares is its
    density."""
    lines = [
        line.split()
        for line in printed(*SMALL, "peers=12", "method.structure=channels").splitlines()
    ]
    assert ["layer", "shape", "small", "density", "kFLOPs"] in lines
    [conv2] = [line for line in lines if line[:1] == ["conv2.weight"]]
    out, into, *_ = map(int, conv2[2].split("x"))
    assert float(conv2[3]) == pytest.approx(out * into / (32 * 16), abs=5e-4)
    assert out < 32
    groups = printed(*SMALL, "peers=12", "method.structure=channels", "method.density=[0.2,0.8]")
    assert ["layer", "shape", "density", "kept", "kFLOPs"] in [
        line.split() for line in groups.splitlines()
    ]


def test_layers_that_stay_whole_are_named() -> None:
    kept = ("method.structure=channels", 'method.keep=["conv1"]')
    sentence = (
        "Kept whole by every peer, because none of their units may be left out: conv1, norm1."
    )
    assert sentence in printed(*SMALL, "peers=12", *kept)
    assert found(*SMALL, "peers=12", *kept)["dense_layers"] == ["conv1", "norm1"]


def test_products_of_activations_have_a_line_and_what_is_not_counted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention between the 28 rows of an image: 2 products of 28 x 28 x 28 multiplications, 87,808
    operations."""
    (tmp_path / "rows_net.py").write_text(
        "from torch import nn\n"
        "from torch.nn import functional\n\n\n"
        "class Rows(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.pair = nn.Bilinear(28, 28, classes)\n\n"
        "    def forward(self, x):\n"
        "        rows = functional.scaled_dot_product_attention(x, x, x)[:, 0].mean(1)\n"
        "        return self.pair(rows, rows)\n"
    )
    monkeypatch.chdir(tmp_path)
    mine = ("data=fashion-mnist", "model.factory=rows_net:Rows", "peers=12", "method=local")
    lines = [line.split() for line in printed(*mine).splitlines()]
    assert ["products", "of", "activations", "87.81"] in lines
    assert "FLOPs do not include pair (Bilinear), trilinear (an operation)" in printed(*mine)
    costs = found(*mine)
    assert costs["fixed_forward_flops"] == 2 * 28 * 28 * 28 * 2
    assert costs["paper"]["flops_per_peer_round"] == 5 * 5000 * (87_808 + 3 * 10)  # 10 biases
    assert found(*SMALL)["not_counted"] is None
    wrong = invoke("data=cifar10", *mine[1:]).exception  # whose rows have 32 values
    assert isinstance(wrong, RunError)
    assert str(wrong).startswith(
        "The network, on an image of shape 3x32x32: Rows.forward (rows_net.py, line 12) rai"
    )


def test_the_costs_of_own_data_are_those_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{k % 7},{k % 5},{3.5 * k}" for k in range(60)]
    (tmp_path / "houses.csv").write_text("\n".join(["rooms,age,price", *rows]))
    (tmp_path / "my.toml").write_text(
        'task = "regression"\npeers = 3\nrounds = 1\ntopology = "full"\nmodel = "mlp"\n'
        '[data]\npath = "houses.csv"\nlabel = "price"\n[partition]\ntest_samples_per_peer = 4\n'
    )
    estimated = json.loads(printed("my.toml", "--json"))
    ExperimentRun.create(compose(read_toml(Path("my.toml")), ["workers=1"]), Path("run")).run()
    (record,) = read_metrics(Path("run"))
    assert estimated["paper"]["flops_per_peer_round"] == record["flops_per_peer"]
    assert estimated["paper"]["busiest_mb"] == pytest.approx(record["busiest"]["paper_mb"])
    assert estimated["wire"]["busiest_down_mb"] == pytest.approx(
        record["busiest"]["wire_down_mb"], rel=1e-6
    )
