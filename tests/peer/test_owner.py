"""What root does in the folder of a service's user: files belong to the user, who can go on."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dispfl import Peer
from dispfl.errors import RunError
from dispfl.peer.doctor.examine import examine
from dispfl.peer.doctor.findings import Level
from dispfl.peer.membership.audit_log import read_audit
from dispfl.peer.site import Site, SiteInfo

SERVICE_USER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of the service's user, which that user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="dispfl-service-"))
    os.chown(folder, SERVICE_USER, SERVICE_USER)
    yield folder
    shutil.rmtree(folder)


def create(folder: Path, name: str) -> Site:
    return Site.create(folder, SiteInfo(name=name, listen="127.0.0.1:7600"), {})


def owners(folder: Path) -> set[int]:
    """The owners of a folder and everything in it."""
    return {path.lstat().st_uid for path in (folder, *folder.rglob("*"))}


def as_service_user(work: Callable[[], object]) -> int:
    """Do something in a process of the service's user; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(SERVICE_USER)
            os.setuid(SERVICE_USER)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_what_root_does_in_the_folder_of_another_user_belongs_to_that_user(
    home: Path, tmp_path: Path
) -> None:
    bob = create(tmp_path / "bob", "bob")
    site = create(home / "sites" / "alice", "alice")
    assert owners(home) == {SERVICE_USER}

    site.members.accept(bob.invite())
    site.rotate()
    site.moved("127.0.0.1:7601")
    site.run_folder.mkdir()
    os.chown(site.run_folder, SERVICE_USER, SERVICE_USER)
    site.request_stop()
    assert owners(home) == {SERVICE_USER}
    assert as_service_user(lambda: Site.open(site.folder).members.revoke("bob")) == 0
    assert [entry["event"] for entry in read_audit(site.folder)][-1] == "revoked"


def test_what_root_creates_in_its_own_folders_stays_its_own(tmp_path: Path) -> None:
    site = create(tmp_path / "alice", "alice")
    site.members.accept(create(tmp_path / "bob", "bob").invite())
    assert owners(site.folder) == {0}


def test_root_follows_no_link_that_the_user_has_put_in_its_way(home: Path, tmp_path: Path) -> None:
    site = create(home / "alice", "alice")
    bob = create(tmp_path / "bob", "bob")
    secret = tmp_path / "secret"
    secret.write_text("of root")
    for name in (".members.json.partial", ".site.toml.partial"):
        (site.folder / name).symlink_to(secret)
    site.members.accept(bob.invite())
    site.moved("127.0.0.1:7601")
    assert (secret.read_text(), secret.stat().st_uid) == ("of root", 0)


def test_root_does_not_run_the_node_of_another_user(home: Path) -> None:
    create(home / "alice", "alice")
    with pytest.raises(RunError, match=r"Run: sudo -u \w+ dispfl peer run .*alice"):
        Peer.open(home / "alice").run(alone=True)
    assert owners(home) == {SERVICE_USER}


def test_the_doctor_names_a_file_of_another_user_and_the_command_that_mends_it(home: Path) -> None:
    site = create(home / "alice", "alice")
    lock = site.folder / ".members.json.lock"
    lock.touch()
    os.chown(lock, 0, 0)
    data = site.folder / "patients.csv"
    data.write_text("the operator's own business")

    finding = next(examine(site.folder))
    assert (finding.topic, finding.level) == ("files", Level.FAILURE)
    assert ".members.json.lock" in finding.text
    os.system(finding.advice.removeprefix("Run as root: "))
    assert next(examine(site.folder)).topic != "files"


def test_a_file_of_another_user_is_named_with_its_owner(home: Path, tmp_path: Path) -> None:
    site = create(home / "alice", "alice")
    invite = create(tmp_path / "bob", "bob").invite()
    lock = site.folder / ".members.json.lock"
    lock.unlink(missing_ok=True)
    lock.touch(0o600)
    messages = home / "message"

    def accept() -> None:
        try:
            Site.open(site.folder).members.accept(invite)
        except RunError as problem:
            messages.write_text(str(problem))

    assert as_service_user(accept) == 0
    assert "belongs to root, and you are nobody" in messages.read_text()
