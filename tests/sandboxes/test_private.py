"""What another user of this machine put where our folders would be, below the temporary directory, is not used."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import NetworkPolicy, SandboxSpec
from rl_harness.errors import RlHarnessError
from rl_harness.sandboxes.local.provider import _state_directory
from rl_harness.sandboxes.process import ProcessOptions, ProcessProvider
from rl_harness.sandboxes.usage import state_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory, with a home that cannot be written."""
    (tmp_path / "home").write_text("no directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir(mode=0o1777)
    return tmp_path / "tmp"


def make_process_sandbox() -> None:
    async def make() -> None:
        provider = ProcessProvider(ProcessOptions())
        await (await provider.create(SandboxSpec(network=NetworkPolicy.FULL))).close()

    asyncio.run(make())


USERS = {
    "rl-harness": state_folder,
    "rl-harness-": lambda: _state_directory(None, search=0o700),
    "rl-harness-process": make_process_sandbox,
}


@pytest.mark.parametrize("name", USERS)
def test_folders_of_the_temporary_directory_are_this_users_alone(name: str, temporary: Path) -> None:
    folder = temporary / f"{name.rstrip('-')}-{os.geteuid()}"
    use: Callable[[], object] = USERS[name]
    mask = os.umask(0)
    try:
        use()
    finally:
        os.umask(mask)
    assert folder.stat().st_mode & 0o022 == 0
    folder.chmod(0o777)
    use()
    assert folder.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("what", ["link", "file", "another user's"])
def test_what_another_user_put_there_is_refused_and_named(name: str, what: str, temporary: Path) -> None:
    folder = temporary / f"{name.rstrip('-')}-{os.geteuid()}"
    victims = temporary.parent / "victims"
    victims.mkdir()
    if what == "link":
        folder.symlink_to(victims)
    elif what == "file":
        folder.write_text("")
    elif os.geteuid() == 0:
        folder.mkdir(mode=0o777)
        os.chown(folder, 65534, 65534)
    else:
        pytest.skip("only root can make a folder that is another user's")
    with pytest.raises(RlHarnessError) as refusal:
        USERS[name]()
    assert str(folder) in str(refusal.value)
    assert list(victims.iterdir()) == []
