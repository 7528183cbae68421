"""A real cluster: two nodes of Ray on this machine, one of which may not see the storage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transfusion.matching import align

RAY = Path(sys.executable).with_name("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RAY.exists(), reason="Ray is not installed"),
]
SMALL = ["--num-cpus", "1", "--object-store-memory", str(2**27)]


@pytest.fixture
def address(tmp_path, monkeypatch):
    """The address of a head node; it and all others are stopped in the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    folder = Path("/tmp") / f"tf-{os.getpid()}"  # names of sockets must be short
    start = [
        RAY,
        "start",
        "--head",
        "--port",
        str(port),
        "--include-dashboard",
        "false",
        "--temp-dir",
        folder,
    ]
    head = subprocess.Popen(
        [*start, *SMALL, "--block"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until_it_answers(port)
    yield f"127.0.0.1:{port}"
    stopped(head)
    shutil.rmtree(folder, ignore_errors=True)


def until_it_answers(port: int) -> None:
    for _ in range(120):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail("Ray did not start")


def stopped(node: subprocess.Popen[bytes]) -> None:
    """Stop a node with all that it has started, and nothing else on this machine."""
    os.killpg(node.pid, signal.SIGTERM)
    node.wait(60)


def joined(address: str, before: str = "true") -> subprocess.Popen[bytes]:
    """A second node, in a view of the file system of its own, after some command there."""
    start = " ".join(map(str, [RAY, "start", "--address", address, *SMALL, "--block"]))
    told = {
        **os.environ,
        **({"RAY_AUTH_MODE": "token"} if (Path.home() / ".ray/auth_token").exists() else {}),
    }
    return subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{before} && {start}"],
        env=told,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def aligned(folder: Path, address: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transfusion", "align", "a", "b", "-o", "pi.safetensors", *more]
    return subprocess.run(
        [*command, "--engine", "ray", "--address", address],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def shared(made, tmp_path):
    """A folder with two models, as all machines should see it."""
    folder = tmp_path / "shared"
    for name, seed in (("a", 1), ("b", 2)):
        shutil.copytree(made("llama", seed), folder / name)
    return folder


def test_two_nodes_find_what_threads_find(address, shared):
    from transfusion.alignment import Alignment

    other = joined(address)
    try:
        time.sleep(20)  # until the node is there
        done = aligned(shared, address, "-q")
        assert done.returncode == 0, done.stderr
        found = Alignment.load(shared / "pi.safetensors")
        assert found.digest == align(shared / "a", shared / "b").digest
    finally:
        stopped(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_node_without_the_storage_is_named_and_nothing_is_written(address, shared):
    other = joined(address, f"mount -t tmpfs none {shared}")
    try:
        time.sleep(20)
        done = aligned(shared, address)
        assert done.returncode == 1
        error = " ".join(done.stderr.split())
        assert "error: on " in error
        assert "cannot be seen" in error
        assert "not mounted at this path" in error
        assert not (shared / "pi.safetensors").exists()
    finally:
        stopped(other)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_on_ray_that_is_asked_to_stop_says_so_and_goes_on_when_asked_again(number, code, shared):
    """Once the journal has a sweep, it is interrupted; what is found in the end is the same."""
    from transfusion.alignment import Alignment

    command = [sys.executable, "-m", "transfusion", "align", "a", "b", "-o", "pi.safetensors", "--json"]
    command += ["--engine", "ray", "--jobs", "1", "--method", "transfusion"]
    run = subprocess.Popen(
        command, cwd=shared, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while run.poll() is None and not (shared / "pi.safetensors.journal").exists():
        time.sleep(0.01)
    os.kill(run.pid, number)
    out, err = run.communicate(timeout=120)
    assert run.returncode == code, err
    assert "interrupted; no output was written" in err
    assert out == ""
    assert [path.name for path in shared.glob("pi*")] == ["pi.safetensors.journal"]
    again = subprocess.run(command, cwd=shared, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(again.stdout)["sha256"] == Alignment.load(shared / "pi.safetensors").digest
    assert (
        json.loads(again.stdout)["sha256"] == align(shared / "a", shared / "b", method="transfusion").digest
    )
