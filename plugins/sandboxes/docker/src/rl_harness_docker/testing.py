"""A real engine and a base image for tests and benchmarks, on a machine that reaches no image registry.

``python -m rl_harness_docker.testing start FOLDER`` starts ``dockerd`` with all its state below FOLDER, imports the
image :data:`BASE_IMAGE` and prints the engine's address; ``stop FOLDER`` ends it. Needs root, Linux, and Debian's
docker.io, iptables, busybox-static, coreutils, bash, dash and python3 (which make up the image).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

BASE_IMAGE = "rl-harness-test-base"
"""GNU's basic commands, dash, bash, Python with its standard library, and busybox for the rest."""

_LIBRARY = re.compile(r"(/\S+\.so\S*)")
# Where busybox differs from what tasks are written for.
_GNU: tuple[str, ...] = (
    "cat",
    "chmod",
    "chown",
    "cp",
    "cut",
    "dd",
    "env",
    "head",
    "id",
    "ls",
    "mkdir",
    "mkfifo",
    "mv",
    "rm",
    "sleep",
)
_GNU += ("sort", "stat", "tail", "timeout", "tr", "truncate", "wc")
_LEFT_OUT = {"__pycache__", "dist-packages", "site-packages", "test", "idlelib", "turtledemo", "ensurepip"}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}


def start(folder: Path) -> str:
    """The address of an engine that keeps everything below ``folder``; one that runs there already is used."""
    folder.mkdir(parents=True, exist_ok=True)
    address = f"unix://{folder}/docker.sock"
    if not answers(address):
        command = ["dockerd", "--data-root", f"{folder}/root", "--exec-root", f"{folder}/exec"]
        command += ["--pidfile", f"{folder}/pid", "--host", address, "--storage-driver", "overlay2"]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        while not answers(address):
            if process.poll() is not None:
                raise RuntimeError(f"dockerd ended: {(folder / 'log').read_text('utf-8', 'replace')[-2000:]}")
            time.sleep(0.1)
    make_base_image(address)
    return address


def stop(folder: Path) -> None:
    """End the engine of :func:`start`, its containers first, and remove its state."""
    address = f"unix://{folder}/docker.sock"
    if answers(address):
        client = _client(address)
        for container in client.containers(all=True):
            client.remove_container(container["Id"], force=True, v=True)
        client.close()
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "pid").read_text())
        os.kill(pid, signal.SIGTERM)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def answers(address: str | None = None) -> bool:
    """Whether an engine answers, at ``address`` or where the environment says."""
    return unreachable(address) is None


def unreachable(address: str | None = None) -> str | None:
    """Why no engine answers; None when one does."""
    import docker.errors  # type: ignore[import-untyped]  # the SDK has no types
    import requests

    try:
        client = _client(address)
        try:
            client.ping()
        finally:
            client.close()
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        return f"no engine answers: {error}"[:300]
    return None


def _client(address: str | None) -> Any:
    import docker
    from docker.utils import kwargs_from_env  # type: ignore[import-untyped]

    return docker.APIClient(**({"base_url": address} if address else kwargs_from_env()), timeout=60)


def make_base_image(address: str | None = None, name: str = BASE_IMAGE) -> None:
    """Import :data:`BASE_IMAGE` from this machine's own programs, unless the engine has it."""
    import docker.errors

    client = _client(address)
    try:
        try:
            client.inspect_image(name)
        except docker.errors.ImageNotFound:
            client.import_image_from_data(_root_file_system(), repository=name, tag="latest", changes=_CHANGES)
    finally:
        client.close()


_CHANGES = ["ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 'CMD ["/bin/sh"]']


def _root_file_system() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in (
            "usr",
            "usr/bin",
            "usr/sbin",
            "usr/lib",
            "usr/lib64",
            "usr/local",
            "usr/local/bin",
            "etc",
            "root",
            "opt",
            "srv",
        ):
            _directory(tar, name)
        for name in ("proc", "sys", "dev", "run", "var", "var/tmp", "tmp"):
            _directory(tar, name, 0o1777 if name.endswith("tmp") else 0o755)
        for name in ("bin", "sbin", "lib", "lib64"):
            _link(tar, name, f"usr/{name}")
        for name, text in _FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(text.encode()))
        programs = [path for path in map(shutil.which, ("bash", "dash", *_GNU)) if path is not None]
        names = {Path(path).name for path in programs}
        for path in programs:
            _copy(tar, Path(path), f"usr/bin/{Path(path).name}")
        _link(tar, "usr/bin/sh", "dash")  # Debian's busybox takes its own commands before those in PATH
        _busybox(tar, but={*names, "sh"})
        python = next(
            (path for path in sorted(Path("/usr/bin").glob("python3.[0-9]*")) if path.stem[-1].isdigit()), None
        )
        if python is not None:
            programs.append(str(python))
            _copy(tar, python, f"usr/bin/{python.name}")
            _link(tar, "usr/bin/python3", python.name)
            library = Path("/usr/lib") / python.name
            tar.add(library, str(library)[1:], filter=_wanted)
            programs += map(str, library.glob("lib-dynload/*.so"))
        for path in _libraries(programs):
            _copy(tar, Path(path), _merged(path))
    return buffer.getvalue()


def _busybox(tar: tarfile.TarFile, but: set[str]) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("no busybox; on Debian: apt-get install busybox-static")
    _copy(tar, Path(busybox), "usr/bin/busybox")
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        if name != "busybox" and name not in but:
            _link(tar, f"usr/bin/{name}", "busybox")


def _libraries(programs: list[str]) -> list[str]:
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    found = {
        match[1] for line in listing.splitlines() if line[:1].isspace() for match in [_LIBRARY.search(line)] if match
    }
    return sorted(path for path in found if Path(path).is_file())


def _merged(path: str) -> str:
    """Where a library goes in a root whose /lib and /lib64 are links."""
    return re.sub(r"^/(lib|lib64)/", r"usr/\1/", path).lstrip("/")


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(member.name).parts
    if _LEFT_OUT & set(parts) or parts[-1].startswith(("config-", "sitecustomize")):
        return None
    if member.issym() and member.linkname.startswith("/"):
        return None
    return member


def _directory(tar: tarfile.TarFile, name: str, mode: int = 0o755) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, mode
    tar.addfile(member)


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    tar.addfile(member)


def _copy(tar: tarfile.TarFile, source: Path, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = source.stat().st_size, 0o755
    with source.open("rb") as file:
        tar.addfile(member, file)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["start", folder]:
            print(start(Path(folder).absolute()))
        case ["stop", folder]:
            stop(Path(folder).absolute())
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
