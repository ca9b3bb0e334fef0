"""Checkpoints give back exactly what was put in, or say that they are damaged."""

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from dispfl.core.flat_module import FlatModule
from dispfl.core.packed import PackedModel, WeightMask
from dispfl.core.report import Report
from dispfl.engines import checkpoint
from dispfl.engines.checkpoint import Checkpoints
from dispfl.engines.checkpoint_part import digest_of
from dispfl.errors import DamagedError, RunError
from dispfl.methods.base import PeerState, initial_state
from dispfl.methods.dispfl import DisPFL
from dispfl.round.context import StepResult


def a_step(which: int, size: int = 11) -> StepResult:
    """A sparse model with another next mask, a buffer, and a report that is partly empty."""
    rng = torch.Generator().manual_seed(which)
    mask, next_mask = torch.rand(2, size, generator=rng) < 0.5
    model = PackedModel.pack(torch.randn(size, generator=rng), mask)
    state = PeerState(
        model, WeightMask.pack(next_mask), {"norm.mean": torch.full((2,), float(which))}
    )
    report = Report(
        scores={"accuracy": which / 7},
        train_loss=0.1,
        failure="Peer 001 failed." if which else None,
    )
    return StepResult(report, state=state)


def same(one: StepResult, other: StepResult) -> bool:
    a, b = one.next_state, other.next_state
    return (
        one.report == other.report
        and a.model.mask.size == b.model.mask.size
        and torch.equal(a.model.values, b.model.values)
        and torch.equal(a.model.mask.bits, b.model.mask.bits)
        and torch.equal(a.next_mask.bits, b.next_mask.bits)
        and list(a.buffers) == list(b.buffers)
        and all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
    )


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Round 0 of two peers, complete."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for k in range(2):
        checkpoints.add(0, f"00{k}", a_step(k))
    checkpoints.complete(0)
    return checkpoints


def files(checkpoints: Checkpoints) -> list[str]:
    return sorted(
        path.relative_to(checkpoints.folder).as_posix()
        for path in checkpoints.folder.rglob("*")
        if path.is_file()
    )


def contents(part: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safetensors.safe_open(part, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in list(file.keys())}, file.metadata()


def damage(checkpoints: Checkpoints) -> str:
    with pytest.raises(DamagedError) as caught:
        checkpoints.load(1)
    return str(caught.value)


def refusal(checkpoints: Checkpoints) -> str:
    """Why a checkpoint that is not damaged cannot be loaded; it is not changed."""
    before = files(checkpoints)
    with pytest.raises(RunError) as caught:
        checkpoints.load(1)
    assert not isinstance(caught.value, DamagedError)
    assert files(checkpoints) == before
    return str(caught.value)


@contextlib.contextmanager
def no_more_open_files() -> Iterator[None]:
    """The next file that this process opens is one too many for the system (EMFILE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Without the rights of root, whom permission bits do not stop."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_two_quick_peers_make_one_part_and_are_restored_bit_for_bit(saved: Checkpoints) -> None:
    assert files(saved) == ["round-000001/complete.json", "round-000001/part-000.safetensors"]
    again = Checkpoints(saved.folder).load(1)
    assert list(again) == ["000", "001"]
    assert all(same(again[f"00{k}"], a_step(k)) for k in range(2))
    assert Checkpoints(saved.folder).finished_rounds() == [1]


def test_a_mask_that_is_also_the_next_mask_stays_one_object(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = initial_state(torch.randn(9), torch.ones(9, dtype=torch.bool))
    checkpoints.add(0, "000", StepResult(Report(), state=state))
    checkpoints.complete(0)
    state = checkpoints.load(1)["000"].next_state
    assert state.next_mask is state.model.mask


def test_without_checkpoints_no_round_is_finished_or_partial(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.finished_rounds() == []
    assert checkpoints.load(1) == {}


def test_steps_that_were_not_flushed_are_not_on_the_disk(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.add(0, "000", a_step(0))
    assert files(checkpoints) == []
    checkpoints.flush(0)
    checkpoints.flush(0)  # nothing new: no empty part
    assert files(checkpoints) == ["round-000001/part-000.safetensors"]
    assert checkpoints.finished_rounds() == []


def test_after_the_time_limit_each_peer_makes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SECONDS_BETWEEN_PARTS", 0.0)
    checkpoints = Checkpoints(tmp_path)
    for k in range(3):
        checkpoints.add(4, f"00{k}", a_step(k))
    assert files(checkpoints) == [f"round-000005/part-00{k}.safetensors" for k in range(3)]
    assert list(checkpoints.load(5)) == ["000", "001", "002"]


def test_a_part_is_written_when_the_waiting_values_reach_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [4 * a_step(k, 100).next_state.model.values.numel() for k in range(4)]
    monkeypatch.setattr(checkpoint, "BYTES_IN_A_PART", values[0] + values[1])
    checkpoints = Checkpoints(tmp_path)
    for k in range(2):
        checkpoints.add(0, f"00{k}", a_step(k, 100))
    assert len(files(checkpoints)) == 1
    checkpoints.add(0, "002", a_step(2, 100))
    assert len(files(checkpoints)) == 1
    checkpoints.complete(0)
    assert json.loads((tmp_path / "round-000001/complete.json").read_text()) == {
        "version": 2,
        "rounds": 1,
        "parts": ["part-000.safetensors", "part-001.safetensors"],
    }


def test_only_the_last_two_of_five_rounds_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for t in range(5):
        checkpoints.add(t, "000", a_step(t))
        checkpoints.complete(t)
    assert checkpoints.finished_rounds() == [4, 5]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["round-000004", "round-000005"]


@pytest.mark.parametrize("survivor", ["part-000.safetensors", "complete.json", None])
def test_the_next_round_deletes_what_a_killed_deletion_left(
    tmp_path: Path, survivor: str | None
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for t in range(4):
        checkpoints.add(t, "000", a_step(t))
        checkpoints.complete(t)
        if t == 1:
            for file in (tmp_path / "round-000001").iterdir():
                if file.name != survivor:
                    file.unlink()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["round-000003", "round-000004"]


def test_a_truncated_part_is_damaged(saved: Checkpoints) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    content = part.read_bytes()
    for length in range(0, len(content), 16):
        part.write_bytes(content[:length])
        assert damage(saved).startswith(f"The checkpoint {part} is damaged (")


def test_a_complete_round_that_lost_a_part_is_damaged(saved: Checkpoints) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    part.unlink()
    assert damage(saved).startswith(f"The checkpoint {part} is damaged (")


def test_a_complete_round_with_an_invalid_list_of_parts_is_damaged(saved: Checkpoints) -> None:
    for content in ("", "[]", "{}", '{"parts": 3}', '{"parts": [], "version": "new"}'):
        (saved.folder / "round-000001/complete.json").write_text(content)
        assert damage(saved).startswith(
            f"The checkpoint {saved.folder / 'round-000001'} is damaged ("
        )


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("000/values", torch.zeros(1)),
        ("000/values", torch.zeros(5, dtype=torch.float64)),
        ("000/mask", torch.zeros(1, dtype=torch.uint8)),
    ],
)
def test_other_tensors_than_those_written_are_damage(
    saved: Checkpoints, name: str, tensor: torch.Tensor
) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    tensors, header = contents(part)
    part.write_bytes(safetensors.torch.save(tensors | {name: tensor}, header))
    assert (
        damage(saved)
        == f"The checkpoint {part} is damaged (the digest of peer 000 does not match)."
    )


def test_a_part_without_its_header_or_a_tensor_is_damaged(saved: Checkpoints) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    tensors, header = contents(part)
    part.write_bytes(safetensors.torch.save(tensors))
    assert damage(saved).startswith(f"The checkpoint {part} is damaged (")
    del tensors["001/mask"]
    part.write_bytes(safetensors.torch.save(tensors, header))
    assert (
        damage(saved)
        == f"The checkpoint {part} is damaged (the digest of peer 001 does not match)."
    )


def test_no_flipped_bit_goes_unnoticed(saved: Checkpoints) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    content = part.read_bytes()
    refused = 0
    for place in range(len(content)):
        part.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            again = saved.load(1)
        except RunError:
            refused += 1
        else:  # the last digit of a number that rounds to the same float
            assert all(same(again[f"00{k}"], a_step(k)) for k in range(2))
    assert refused >= len(content) - 2


def test_the_units_of_masks_belong_to_the_digest(tmp_path: Path) -> None:
    network, method = (
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
        DisPFL(structure="channels"),
    )
    layout = method.layout(network, lambda: torch.zeros(2, 4))
    state = method.start(FlatModule(network).read(), layout, 0.5, seed=0, peer="000")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.add(0, "000", StepResult(Report(), state=state))
    checkpoints.complete(0)
    assert list(checkpoints.load(1)) == ["000"]
    part = tmp_path / "round-000001/part-000.safetensors"
    tensors, header = contents(part)
    part.write_bytes(safetensors.torch.save(tensors, header | {"units": header["units"] + " "}))
    assert (
        damage(checkpoints)
        == f"The checkpoint {part} is damaged (the digest of peer 000 does not match)."
    )


def test_other_peers_are_read_from_a_part_in_which_one_is_damaged(saved: Checkpoints) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    tensors, header = contents(part)
    part.write_bytes(safetensors.torch.save(tensors | {"000/values": torch.zeros(1)}, header))
    assert same(saved.load(1, ["001"])["001"], a_step(1))


@pytest.mark.parametrize(
    ("version", "fix"),
    [(None, "Resume with the dispfl that wrote it"), ("1", "Resume with"), ("3", "Upgrade dispfl")],
)
@pytest.mark.parametrize("where", ["part-000.safetensors", "complete.json"])
def test_another_version_of_the_format_is_refused_by_name(
    saved: Checkpoints, version: str | None, fix: str, where: str
) -> None:
    file = saved.folder / "round-000001" / where
    given = {} if version is None else {"version": version}
    if where == "complete.json":
        found = json.loads(file.read_text())
        del found["version"]
        file.write_text(json.dumps(found | {name: int(text) for name, text in given.items()}))
    else:
        tensors, header = contents(file)
        del header["version"]
        file.write_bytes(safetensors.torch.save(tensors, header | given))
    beginning = (
        f"The checkpoint {file} has version {version or 1} of the format; this dispfl reads version"
        f" 2. {fix}"
    )
    assert refusal(saved).startswith(beginning)


def test_a_report_with_a_field_of_another_dispfl_is_refused_and_not_called_damaged(
    saved: Checkpoints,
) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    tensors, header = contents(part)
    peers = json.loads(header["peers"])
    for name, entry in peers.items():
        own = {key: tensor for key, tensor in tensors.items() if key.startswith(name)}
        del entry["digest"]
        entry["report"]["taste"] = 3
        entry["digest"] = digest_of(entry, own, None)
    part.write_bytes(safetensors.torch.save(tensors, header | {"peers": json.dumps(peers)}))
    assert "is intact, but another dispfl wrote it (" in refusal(saved)
    assert "taste" in refusal(saved)


def test_too_many_open_files_are_not_damage(saved: Checkpoints) -> None:
    with pytest.raises(RunError) as caught, no_more_open_files():
        saved.load(1)
    assert (
        str(caught.value)
        == f"The checkpoint {saved.folder / 'round-000001/complete.json'} cannot be read: Too many"
        " open files. Nothing was changed; fix the cause and start again."
    )
    assert files(saved) == ["round-000001/complete.json", "round-000001/part-000.safetensors"]


def test_missing_rights_are_not_damage(saved: Checkpoints) -> None:
    (saved.folder / "round-000001").chmod(
        0o700
    )  # also where others may enter the folder of the test
    with as_another_user():
        for read in (lambda: saved.load(1), saved.finished_rounds):
            with pytest.raises(
                RunError, match="cannot be read: Permission denied\\. Nothing was changed"
            ) as caught:
                read()
            assert not isinstance(caught.value, DamagedError)
    assert files(saved) == ["round-000001/complete.json", "round-000001/part-000.safetensors"]


def test_an_error_of_the_disk_is_not_damage(saved: Checkpoints) -> None:
    """The beginning of a process's memory is a file that really gives EIO."""
    manifest = saved.folder / "round-000001/complete.json"
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")
    assert "complete.json cannot be read: Input/output error. Nothing was changed" in refusal(saved)


def test_a_folder_in_the_place_of_a_part_is_not_damage(saved: Checkpoints) -> None:
    part = saved.folder / "round-000001/part-000.safetensors"
    part.unlink()
    part.mkdir()
    assert "part-000.safetensors cannot be read: Is a directory. Nothing was changed" in refusal(
        saved
    )


def test_damaged_checkpoints_are_kept_under_another_name_whatever_follows(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):  # the same round twice
        checkpoints.add(0, "000", a_step(0))
        checkpoints.complete(0)
        checkpoints.set_aside(1, DamagedError("Round 1 is damaged."), "Repeating it.")
    for t in range(4):
        checkpoints.add(t, "000", a_step(t))
        checkpoints.complete(t)
    assert checkpoints.finished_rounds() == [3, 4]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [
        "round-000001.2.damaged",
        "round-000001.damaged",
        "round-000003",
        "round-000004",
    ]


def test_a_state_that_has_not_changed_is_the_file_of_the_round_before(saved: Checkpoints) -> None:
    saved.add(1, "000", a_step(7))
    assert saved.keep("001")
    saved.complete(1)
    assert files(saved)[2:] == [
        "round-000002/complete.json",
        "round-000002/part-000.safetensors",
        "round-000002/part-kept-000.safetensors",
    ]
    kept = saved.folder / "round-000002/part-kept-000.safetensors"
    assert kept.samefile(saved.folder / "round-000001/part-000.safetensors")
    again = Checkpoints(saved.folder).load(2)
    assert same(again["000"], a_step(7))
    assert same(again["001"], a_step(1))


def test_a_round_without_any_step_has_a_complete_checkpoint(saved: Checkpoints) -> None:
    for peer in ("000", "001"):
        assert saved.keep(peer)
    saved.complete(1)
    assert saved.finished_rounds() == [1, 2]
    assert saved.load(2).keys() == {"000", "001"}


def test_a_resumed_run_keeps_states_of_the_rounds_before_it(saved: Checkpoints) -> None:
    resumed = Checkpoints(saved.folder)
    assert not resumed.keep("001")  # it does not know yet that there is one
    resumed.load(1)
    for t in range(1, 6):
        assert resumed.keep("001")
        resumed.add(t, "000", a_step(t))
        resumed.complete(t)
    again = Checkpoints(saved.folder).load(6)
    assert same(again["000"], a_step(5))
    assert same(again["001"], a_step(1))


def test_the_few_states_of_an_outdated_part_are_written_anew(tmp_path: Path) -> None:
    """Two of three states change: the third is a third of its part, and gets a part of its own."""
    checkpoints = Checkpoints(tmp_path)
    for k in range(3):
        checkpoints.add(0, f"00{k}", a_step(k))
    checkpoints.complete(0)
    for k in range(2):
        checkpoints.add(1, f"00{k}", a_step(5 + k))
    checkpoints.keep("002")
    checkpoints.complete(1)
    tensors, _ = contents(tmp_path / "round-000002/part-kept-000.safetensors")
    assert {name.split("/")[0] for name in tensors} == {"002"}
    again = checkpoints.load(2)
    assert [same(again[f"00{k}"], a_step(which)) for k, which in enumerate((5, 6, 2))] == [True] * 3


def test_kept_states_are_no_finished_steps_of_a_round_in_progress(saved: Checkpoints) -> None:
    saved.add(1, "000", a_step(7))
    saved.keep("001")
    saved.complete(1)
    (saved.folder / "round-000002/complete.json").unlink()
    assert list(saved.load(2)) == ["000"]


def test_a_state_of_a_round_that_was_not_saved_is_not_kept_later(saved: Checkpoints) -> None:
    saved.saves_round = False
    saved.add(1, "000", a_step(7))
    saved.saves_round = True
    assert not saved.keep("000")
    assert saved.keep("001")


def test_after_a_failed_write_in_the_background_no_checkpoint_becomes_complete(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "round-000001/.part-000.safetensors.partial").mkdir(parents=True)

    def save_round() -> None:
        with checkpoints.in_background():
            checkpoints.add(0, "000", a_step(0))
            checkpoints.complete(0)

    with pytest.raises(RunError):
        save_round()
    assert checkpoints.finished_rounds() == []


def test_what_is_written_in_the_background_is_on_the_disk_at_the_end(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.in_background():
        for t in range(3):
            checkpoints.add(t, "000", a_step(t))
            checkpoints.complete(t)
    assert checkpoints.finished_rounds() == [2, 3]
    assert same(checkpoints.load(3)["000"], a_step(2))


def test_states_are_read_one_by_one_from_a_complete_checkpoint(saved: Checkpoints) -> None:
    states = saved.states(1, ["000", "001"])
    assert same(StepResult(a_step(1).report, state=states["001"]), a_step(1))


def test_a_model_without_any_weight_is_restored(tmp_path: Path) -> None:
    """As that of a peer of FedAvg, which keeps none between two rounds."""
    checkpoints = Checkpoints(tmp_path)
    state = initial_state(torch.randn(9), torch.zeros(9, dtype=torch.bool))
    checkpoints.add(0, "000", StepResult(Report(), state=state))
    checkpoints.complete(0)
    assert checkpoints.load(1)["000"].next_state.model.values.shape == (0,)
