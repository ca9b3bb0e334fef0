"""The reference of settings and commands: complete, and the same as the code."""

from pathlib import Path

import pytest
from program import Dispfl, dispfl

__all__ = ["dispfl"]

from messages import refused

from dispfl.cli.api_reference import api_as_markdown
from dispfl.cli.completion import WORDS
from dispfl.cli.reference import commands_as_markdown, with_quantities, words_as_json
from dispfl.core.train import Train
from dispfl.errors import ConfigError
from dispfl.peer.transport.http import Limits
from dispfl.reference import as_markdown, find_entries, settings_reference, site_reference

DOCS = Path(__file__).parents[1] / "docs" / "reference"


def test_the_pages_are_those_of_the_code() -> None:
    """`make reference` writes them. Usage lines depend on Typer's version: of commands, the names
    are compared."""
    assert (DOCS / "settings.md").read_text() == as_markdown()
    assert (DOCS / "api.md").read_text() == api_as_markdown()
    assert WORDS.read_text() == words_as_json()
    run_directory = (DOCS / "run-directory.md").read_text()
    assert run_directory == with_quantities(run_directory)
    written, now = (
        [line for line in page.splitlines() if line.startswith("## ")]
        for page in ((DOCS / "commands.md").read_text(), commands_as_markdown())
    )
    assert written == now


def test_every_setting_has_a_type_and_a_meaning() -> None:
    entries = [entry for table in settings_reference() for entry in table.entries]
    assert len(entries) > 60
    assert [entry.key for entry in entries if not entry.meaning or not entry.kind] == []
    assert {f"train.{field}" for field in Train.model_fields} <= {entry.key for entry in entries}


def test_an_entry_has_the_range_and_the_default_of_dispfl_run() -> None:
    _, [momentum] = find_entries("train.momentum")
    assert (momentum.kind, momentum.default) == ("a number in [0, 1)", "0")
    _, [batch_size] = find_entries("batch_size")
    assert batch_size.default == "32"
    _, densities = find_entries("method.density")
    assert [entry.components for entry in densities] == [
        ("dispfl", "da-dpfl"),
        ("subfedavg",),
        ("dpsgd", "dpsgd-ft", "dfedavgm", "dfedsam"),
        ("ssfl",),
    ]


def test_a_component_lists_its_own_settings() -> None:
    table, entries = find_entries("ditto")
    assert table.name == "method"
    assert [entry.key for entry in entries] == [
        "method.private", "method.robust", "method.byzantine",
        "method.cohort", "method.prox_mu", "method.global_epochs", "method.personal_epochs",
    ]  # fmt: skip


def test_the_settings_of_a_real_site_are_among_them_with_their_defaults() -> None:
    table, [shortest] = find_entries("deadlines.min")
    assert (table.name, shortest.kind, shortest.default) == ("deadlines", "a number above 0", "30")
    _, [networks] = find_entries("allow_networks")
    assert networks.meaning.startswith("Networks that the site may connect to")
    assert [entry.key for entry in find_entries("validation")[1]] == [
        "method.validation", "partition.validation", "validation"
    ]  # fmt: skip
    site = [entry for table in site_reference() for entry in table.entries]
    assert {f"limits.{field}" for field in Limits.model_fields} <= {entry.key for entry in site}
    assert [entry.key for entry in site if not entry.meaning or not entry.kind] == []


def test_an_unknown_key_is_refused() -> None:
    with refused(ConfigError, key="train.momentun"):
        find_entries("train.momentun")


def test_explain_prints_an_entry(dispfl: Dispfl) -> None:
    said = dispfl("explain", "train.momentum")
    assert (
        " ".join(said.out.split())
        == "train.momentum a number in [0, 1) Momentum of SGD. Default: 0."
    )
    assert "method.prox_mu" in dispfl("explain", "ditto").out
    assert "dirichlet" in dispfl("explain", "partition").out
    assert "top-level keys" in dispfl("explain").out
    site = " ".join(dispfl("explain", "site.toml").out.split())
    assert "all others but `peers`" in site
    assert "threads a whole number of at least 1" in site


def test_settings_of_a_users_own_method_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_explained.py").write_text(
        "from dispfl import DisPFL\n\n\n"
        "class Careful(DisPFL):\n"
        '    """Dis-PFL that waits."""\n\n'
        "    patience: int = 3\n"
        '    """Rounds to wait."""\n'
    )
    table, entries = find_entries("own_explained:Careful")
    assert table.components == {"own_explained:Careful": "Dis-PFL that waits."}
    by_key = {entry.key: entry for entry in entries}
    assert by_key["method.patience"].meaning == "Rounds to wait."
    assert by_key["method.patience"].default == "3"
    assert "method.density" in by_key
    with refused(ConfigError, key="json:loads"):
        find_entries("json:loads")
