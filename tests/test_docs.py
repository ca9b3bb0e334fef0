"""The worked examples in the documentation run as they stand."""

import contextlib
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from forked_program import ForkedProgram
from typer.testing import CliRunner

from dispfl.cli import app, prompts
from dispfl.cli.relay import relay
from dispfl.config import compose, read_toml
from dispfl.data.datasets import load_dataset
from dispfl.peer.local_federation import free_ports
from dispfl.peer.state.store import rounds_of
from dispfl.runs.async_clock import AsyncClock, run_cost
from dispfl.runs.prepare import prepare, split_dataset
from dispfl.testing import check_method
from dispfl.wire.refusals import Refusal

DOCS = Path(__file__).parent.parent / "docs"
EXTEND = (DOCS / "extend.md").read_text()
DEPLOY = (DOCS / "deploy.md").read_text()
QUICK = ["peers=2", "rounds=1", "model=mlp", "train.epochs=1", "partition.samples_per_peer=20"]


def extension_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", EXTEND, re.S)


def test_the_extensions_of_the_page_run_in_python_and_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(
        sys.modules, "my_module", sys
    )  # so that the page's module does not stay loaded
    del sys.modules["my_module"]
    code = extension_blocks("python")
    (tmp_path / "my_module.py").write_text(
        "\n".join(block for block in code if block.startswith("# my_module.py"))
    )
    names: dict[str, Any] = {}
    for block in code:
        if not block.startswith("# my_module.py"):
            exec(compile(block, "extend.md", "exec"), names)  # our own text
    assert names["run"].summary["method"] == "Pulled"
    assert names["run"].summary["scores"]["accuracy"]["mean"] > 0.3
    assert list(names["regression"].scores) == ["rmse", "largest error"]
    assert compose({}, ["method=my_module:Pulled", "method.strength=0.1"]).method == names[
        "Pulled"
    ](strength=0.1)
    commands = "".join(extension_blocks("sh")).splitlines()
    assert len(commands) == 5
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "dispfl"
        result = CliRunner().invoke(app, [*words, "train.epochs=1"])
        assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"
    for kind in ("MedianDisPFL", "Pulled"):
        check_method(getattr(sys.modules["my_module"], kind)())


def test_the_method_takes_at_most_thirty_lines() -> None:
    assert len(extension_blocks("python")[0].splitlines()) <= 30


def test_the_groups_of_entry_points_are_those_of_the_registry() -> None:
    groups = set(re.findall(r"`(dispfl\.[a-z]+s)`", EXTEND))
    assert groups == {
        "dispfl.methods",
        "dispfl.topologies",
        "dispfl.partitions",
        "dispfl.models",
        "dispfl.datasets",
    }


def test_the_reference_of_the_run_directory_has_every_field(tmp_path: Path) -> None:
    """And no other: those of a run with groups of peers and a clock."""
    result = CliRunner().invoke(
        app,
        ["run", *QUICK, "method.density=0.4,0.8", "fleet=phones", "--out", str(tmp_path / "run")],
    )
    assert result.exit_code == 0, result.output
    page = (DOCS / "reference/run-directory.md").read_text()
    for file, read in (("metrics.jsonl", lambda text: text.splitlines()[0]), ("summary.json", str)):
        section = page.partition(f"## `{file}`")[2].partition("\n## ")[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        described = re.findall(r"`([\w.]+)`", " ".join(cells))
        content = json.loads(read((tmp_path / "run" / file).read_text()))
        fields = list(content)
        if file == "metrics.jsonl":
            for name in ("busiest", "simulated"):
                at = fields.index(name)
                fields[at : at + 1] = [f"{name}.{key}" for key in content[name]]
        assert described == fields, file


def test_the_page_about_python_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.S):
        exec(compile(block, "python.md", "exec"), names)  # our own text
    assert repr(names["run"]).startswith("Run(dispfl, 8 peers, 5 rounds, accuracy 0.")
    assert names["kept"].shape == (64, 20)
    assert 0 <= names["score"] <= 1
    assert len(names["curve"]) == 5
    assert len(names["norms"]) == 5
    assert 3 < len(names["stopped"].metrics) < 50
    assert names["stopped"].summary["stopped"].startswith("validation has not improved")


# docs/deploy.md: three sites on this machine, by the commands that the page has

SITES = ("alice", "bob", "carol")
PATIENCE = 240.0
"""Seconds after which a federation that does not end has failed; a busy machine takes its time."""


@dataclass(frozen=True)
class Typed:
    """A command of the page, who types it, and what the page says that it prints."""

    site: str
    command: str
    shown: tuple[str, ...]


@dataclass
class Walk:
    """Follows the page: `dispfl peer run` in processes of their own, everything else in this
    one."""

    folder: Path
    running: dict[str, ForkedProgram] = field(default_factory=dict)

    def follow(self, typed: Typed) -> None:
        """Type one command and compare."""
        program, *words = shlex.split(typed.command)
        here = self.folder / typed.site
        if words[:2] != ["peer", "run"]:
            self._wait()  # what comes after `run` in the page comes when all have finished
        if program == "python3":
            script = [sys.executable, *words]
            self.compare(
                typed,
                subprocess.run(
                    script, cwd=here, check=True, stdout=subprocess.PIPE, text=True
                ).stdout,
            )
            return
        assert program == "dispfl"
        if words[:2] == ["peer", "run"]:
            self.running[typed.site] = ForkedProgram(words, here, here / "log.txt")
            return
        with contextlib.chdir(here):
            result = CliRunner().invoke(app, words, input="y\n")
        assert result.exit_code == 0, (
            f"{typed.site}$ {typed.command}\n{result.output}\n{result.exception}"
        )
        for invite in here.glob("site/*.invite"):  # sent by mail
            for site in SITES:
                shutil.copy(invite, self.folder / site)
        self.compare(typed, result.stdout)

    def compare(self, typed: Typed, printed: str) -> None:
        """Every line that the page shows was printed, in that order; numbers may be others."""
        lines = iter(plain(line) for line in printed.splitlines())
        for line in typed.shown:
            assert line == "..." or any(plain(line) == other for other in lines), (
                f"{typed.command}: {line}\n{printed}"
            )

    def _wait(self) -> None:
        while self.running:
            site, process = self.running.popitem()
            log = self.folder / site / "log.txt"
            assert process.wait(PATIENCE) == 0, log.read_text()
            [run] = [
                typed
                for typed in page_commands()
                if typed.site == site and "peer run" in typed.command
            ]
            self.compare(run, log.read_text())

    def close(self) -> None:
        """Leave nothing running."""
        for process in self.running.values():
            process.kill()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DEPLOY, re.S)


def page_commands() -> list[Typed]:
    """Everything at a prompt, in the page's order."""
    commands: list[Typed] = []
    for line in "".join(blocks("console")).splitlines():
        if prompt := re.match(rf"({'|'.join(SITES)})\$ (.*)", line):
            commands.append(Typed(prompt[1], prompt[2], ()))
        elif line.strip():
            last = commands[-1]
            commands[-1] = replace(last, shown=(*last.shown, line))
    return commands


def plain(line: str) -> str:
    """A line without what differs from run to run: numbers, fingerprints, addresses, the width of
    columns."""
    line = re.sub(r"([0-9a-f]{4} ){7}[0-9a-f]{4}", "FINGERPRINT", line)
    line = re.sub(r"(127\.0\.0\.1|[a-z0-9.]+\.example\.org|0\.0\.0\.0):\d+", "ADDRESS", line)
    return " ".join(re.sub(r"\d+(\.\d+)?", "#", line).split())


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    """Three folders with the files that the page has."""
    for site in SITES:
        (tmp_path / site).mkdir()
        (tmp_path / site / "federation.toml").write_text(blocks("toml")[0])
        [code] = blocks("python")
        (tmp_path / site / "patients.py").write_text(code)
        [table] = blocks("csv")
        (tmp_path / site / "new.csv").write_text(table)
    following = Walk(tmp_path)
    yield following
    following.close()


def test_three_sites_are_deployed_by_the_commands_of_the_page_and_print_what_it_shows(
    walk: Walk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "at_terminal", lambda: True)
    ports = dict(zip(SITES, free_ports(3), strict=True))
    for typed in page_commands():
        here = f"127.0.0.1:{ports[typed.site]}"
        command = typed.command.replace("0.0.0.0:7600", here).replace(
            f"{typed.site}.example.org:7600", here
        )
        walk.follow(replace(typed, command=command))
    for site in SITES:
        done = rounds_of(walk.folder / site / "site" / "run")
        assert sorted(done) == list(range(20))
        assert done[19]["received"] == [other for other in SITES if other != site]


def test_the_federation_of_the_page_can_be_tried_in_a_simulation_before_it_is_deployed(
    walk: Walk,
) -> None:
    """Of the page's table of 200 patients 160 are for training: enough for three peers with 50
    each."""
    [trial] = [block for block in blocks("sh") if "test.toml" in block]
    filtering, trying = trial.splitlines()
    folder = walk.folder / "alice"
    subprocess.run([sys.executable, "patients.py", "alice"], cwd=folder, check=True)
    subprocess.run(filtering, shell=True, cwd=folder, check=True)
    config, *overrides = shlex.split(trying.removeprefix("dispfl up --peers 3 "))
    with contextlib.chdir(folder):
        experiment = compose(read_toml(Path(config)), ["peers=3", *overrides])
        split = split_dataset(experiment, load_dataset(experiment.data))
    assert [len(rows) for rows in split.train] == [50, 50, 50]


def test_the_image_has_the_extras_of_sites_and_relays() -> None:
    dockerfile = (DOCS.parent / "deploy/Dockerfile").read_text()
    [extras] = re.findall(r"'\.\[(.*?)\]'", dockerfile)
    assert set(extras.split(",")) == {"peer", "outbox", "export", "privacy", "metrics"}


def test_the_devices_of_the_page_about_time_average_what_others_send_without_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (DOCS / "time.md").read_text()
    [devices] = re.findall(r"`phones.toml` describes.*?```toml\n(.*?)```", text, re.S)
    (tmp_path / "phones.toml").write_text(devices)
    assert "dispfl run phones.toml schedule=async" in text
    _, _, context = prepare(compose(read_toml(tmp_path / "phones.toml"), ["schedule=async"]))
    clock = AsyncClock(context, run_cost(context))
    steps = 0
    averaged = 0
    for _ in range(context.settings.rounds):
        for step in clock.next_round().steps:
            steps += 1
            averaged += len(step.models)
    assert averaged > 2 * steps
    assert not caplog.records


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("name", ["dispfl.service", "dispfl-relay.service"])
def test_systemd_finds_nothing_wrong_with_the_service_units(tmp_path: Path, name: str) -> None:
    """Nor with the lines that are comments until an operator needs them."""
    unit = (DOCS.parent / "deploy" / name).read_text()
    there = unit.replace("/opt/dispfl/bin/dispfl", sys.executable)
    there = re.sub("^User=.*$", "User=root", there, flags=re.M)
    there = re.sub(r"^#(\w+=)", r"\1", there, flags=re.M)
    (tmp_path / name).write_text(there)
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / name],
        capture_output=True,
        text=True,
    )
    assert name not in found.stderr


def test_an_outbox_in_a_folder_is_a_commented_line_of_the_sites_unit() -> None:
    unit = (DOCS.parent / "deploy/dispfl.service").read_text()
    assert "ProtectSystem=strict" in unit
    assert "#ReadWritePaths=/mnt/share/alice" in unit.splitlines()


def test_the_command_of_the_relays_unit_has_options_that_exist() -> None:
    unit = (DOCS.parent / "deploy/dispfl-relay.service").read_text()
    [command] = re.findall("^ExecStart=(.*)$", unit, re.M)
    options = set(re.findall(r"--[\w-]+", command))
    parameters = {f"--{name.replace('_', '-')}" for name in inspect.signature(relay).parameters}
    assert options <= parameters


def test_the_sentences_that_the_page_helps_with_are_those_of_the_program() -> None:
    joined = re.compile(r'" *\n *f?"')  # a sentence over several lines of source
    source = "".join(
        joined.sub("", file.read_text()) for file in (DOCS.parent / "src/dispfl").rglob("*.py")
    )
    rows = re.findall(r"^\| `(.*?)`", DEPLOY[DEPLOY.index("## Troubleshooting") :], re.M)
    assert len(rows) > 15
    for sentence in rows:
        fixed = re.split(
            r"\S*/\S*|\b(?:alice|bob|carol|hearts?|site|rounds?)\b|[\d(=:;,.]+|  ", sentence
        )
        longest = max(fixed, key=len).strip()
        assert longest in source, f"{longest!r} of {sentence!r}"


def test_every_refusal_is_in_the_protocols_tables() -> None:
    page = (DOCS / "protocol.md").read_text()
    missing = [reason for reason in Refusal if f"`{reason}`" not in page]
    assert not missing


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


PAGES = [
    DOCS.parent / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "results").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for file, anchor in re.findall(
        r"\]\(([\w./-]+\.(?:md|svg|png))?(?:#([\w-]+))?\)", page.read_text()
    ):
        there = page.parent / file if file else page
        assert there.exists(), there
        assert not anchor or anchor in anchors(there), f"{there}#{anchor}"


def test_the_architecture_page_names_files_functions_and_rooms_that_exist() -> None:
    page = (DOCS / "architecture.md").read_text()
    package = DOCS.parent / "src/dispfl"
    files = set(re.findall(r"`([a-z_/]+\.py)[`:]", page)) - {
        "listener.py",
        "ray_pool.py",
        "ray_worker.py",
    }
    assert len(files) > 30
    for file in files:
        root = DOCS.parent if file.startswith(("benchmarks/", "tests/", "examples/")) else package
        assert (root / file).is_file(), file
    for file, name in re.findall(r"`([a-z_/]+\.py): (\w+)", page):
        assert re.search(rf"(def|class) {name}\b|^{name}\b", (package / file).read_text(), re.M), (
            name
        )

    rooms = set(re.findall(r"^\| `([a-z]+)/` \|", page, re.M))
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert rooms == folders


RESULTS = [DOCS / "claims.md", *sorted((DOCS / "results").glob("*.md"))]


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_results_are_short_to_read(page: Path) -> None:
    """A table cell has at most 20 words, a paragraph or list item at most 5 lines."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for cell in re.findall(r"(?<=\|)[^|\n]+(?=\|)", text):
        shown = re.sub(r"\]\([^)]*\)", "]", cell)
        assert len(shown.split()) <= 20, cell
    for paragraph in re.split(r"\n\n|\n(?=- )", text):
        if not paragraph.lstrip().startswith("|"):
            assert len(paragraph.strip().splitlines()) <= 5, paragraph
            assert max(map(len, paragraph.splitlines()), default=0) <= 100, paragraph


def test_every_page_of_results_is_in_its_overview() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "results/index.md").read_text()))
    assert {page.name for page in RESULTS} - {"claims.md", "index.md"} <= linked


def test_the_page_about_a_first_paper_goes_from_a_method_to_a_table_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "near", sys)  # so that the page's module does not stay loaded
    del sys.modules["near"]
    names: dict[str, Any] = {}
    for language, block in re.findall(
        r"```(python|sh)\n(.*?)```", (DOCS / "first-paper.md").read_text(), re.S
    ):
        if block.startswith("# near.py"):
            (tmp_path / "near.py").write_text(block)
        elif language == "python":
            exec(compile(block, "first-paper.md", "exec"), names)  # our own text
        else:
            for command in block.splitlines():
                program, *words = shlex.split(command)
                assert program == "dispfl"
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"
    assert (tmp_path / "figure-1.pdf").read_bytes().startswith(b"%PDF")
    table = (tmp_path / "runs" / "paper" / "comparison.tex").read_text()
    assert all(name in table for name in ("Near", "D-PSGD", "Local"))
    assert (tmp_path / "runs" / "temperature" / "comparison.csv").exists()
