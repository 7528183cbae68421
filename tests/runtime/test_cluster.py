"""A real cluster: two nodes of Ray on this machine, one of which may not see the storage."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transfusion.matching.align import align

RAY = Path(sys.executable).with_name("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RAY.exists(), reason="Ray is not installed"),
]
SMALL = ["--num-cpus", "1", "--object-store-memory", str(2**27)]
AMPLE = 3600
"""Seconds after which something hangs, rather than that the machine is busy."""
SETTINGS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # at 15, which it would be, they get next to nothing of a busy machine
    "RAY_worker_register_timeout_seconds": str(AMPLE),
}
"""Of all processes of Ray that are started here."""
NODES = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < 2:
    time.sleep(0.2)
"""
"""A program that ends when a cluster has two nodes."""


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def address():
    """The address of a head node; it and all others are stopped in the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
    until_it_answers(port, head)
    yield f"127.0.0.1:{port}"
    stopped(head)
    shutil.rmtree(folder, ignore_errors=True)


def until_it_answers(port: int, head: subprocess.Popen[bytes]) -> None:
    while head.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"Ray did not start: it ended with {head.returncode}")


def until_both_are_there(address: str, other: subprocess.Popen[bytes]) -> None:
    asking = subprocess.Popen([sys.executable, "-c", NODES, address], stderr=subprocess.DEVNULL)
    try:
        while asking.poll() is None:
            assert other.poll() is None, f"the second node ended with {other.returncode}"
            time.sleep(0.2)
    finally:
        asking.kill()
    assert asking.wait() == 0


def stopped(node: subprocess.Popen[bytes]) -> None:
    """Stop a node with all that it has started, and nothing else on this machine."""
    os.killpg(node.pid, signal.SIGTERM)
    node.wait(AMPLE)


def joined(address: str, before: str = "true") -> subprocess.Popen[bytes]:
    """A second node, in a view of the file system of its own, after some command there."""
    start = " ".join(map(str, [RAY, "start", "--address", address, *SMALL, "--block"]))
    info = {
        **os.environ,
        **({"RAY_AUTH_MODE": "token"} if (Path.home() / ".ray/auth_token").exists() else {}),
    }
    return subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{before} && {start}"],
        env=info,
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
        timeout=AMPLE,
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
    from transfusion.alignment.alignment import Alignment

    other = joined(address)
    try:
        until_both_are_there(address, other)
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
        until_both_are_there(address, other)
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
def test_a_run_on_ray_that_is_asked_to_stop_says_so(number, code, shared):
    command = [sys.executable, "-m", "transfusion", "align", "a", "b", "-o", "pi.safetensors", "--json", "-v"]
    command += ["--engine", "ray", "--jobs", "1", "--method", "transfusion"]
    run = subprocess.Popen(
        command, cwd=shared, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stderr is not None
    while "sweep 1" not in run.stderr.readline() and run.poll() is None:
        pass
    os.kill(run.pid, number)
    out, err = run.communicate(timeout=AMPLE)
    assert run.returncode == code, err
    assert "interrupted; no output was written" in err
    assert out == ""
    assert not list(shared.glob("pi*"))
