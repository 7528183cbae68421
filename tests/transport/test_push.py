"""Uploading an output: what arrives at a stand-in for the hub, which knows just the calls that are made."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors import safe_open
from safetensors.torch import save_file

from small_models import CASES, finetuned
from transfusion.alignment.alignment import Alignment
from transfusion.errors import SettingError
from transfusion.transport.record import PI_FILE
from transfusion.transport.transport import transport

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's library
TOKEN = "hf_of_the_tests"
NEW = "me/moved"


class Hub(ThreadingHTTPServer):
    """Repositories of models: ``files`` by repository and name, and every call in its order."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Calls)
        self.calls: list[str] = []
        self.created: dict[str, str] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.stored: dict[str, bytes] = {}
        self.commits: list[str] = []
        Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Calls(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_PUT(self) -> None:
        self.server.calls.append("put")
        body = self.content()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.stored[oid] = body
        self.answer({})

    def do_GET(self) -> None:
        self.server.calls.append(f"get {self.path}")
        for repository in self.server.created:
            if self.path.startswith(f"/api/models/{repository}/revision/"):  # asked by older releases
                return self.answer({"id": repository, "xetEnabled": False})
        return self.answer({"error": "Repository not found"}, 404)

    def do_POST(self) -> None:
        body = self.content()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.server.calls.append("unknown")
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path.startswith("/api/models/"):
            repository, what = self.path.removeprefix("/api/models/").split("/")[:3], self.path.split("/")[5]
            return getattr(self, what)("/".join(repository[:2]), body)
        if self.path.endswith("/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        calls = {"/api/repos/create": self.create, "/api/validate-yaml": self.validate}
        return calls[self.path](json.loads(body))

    def create(self, asked: Any) -> None:
        self.server.calls.append("create")
        repository = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] == "others":
            return self.answer({"error": "You don't have the rights"}, 403)
        url = {"url": f"{self.server.address}/{repository}"}
        if repository in self.server.created:
            return self.answer(url, 409)
        self.server.created[repository] = asked.get("visibility") or f"private: {asked.get('private')}"
        return self.answer(url)

    def validate(self, asked: Any) -> None:
        self.server.calls.append("validate")
        ModelCard(asked["content"])
        self.answer({"errors": [], "warnings": []})

    def preupload(self, repository: str, body: bytes) -> None:
        self.server.calls.append("preupload")
        names = [one["path"] for one in json.loads(body)["files"]]
        kinds = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
        told = [{"path": name, "uploadMode": kind, "shouldIgnore": False} for name, kind in kinds.items()]
        self.answer({"files": told})

    def batch(self, asked: Any) -> None:
        self.server.calls.append("batch")
        actions = [
            {**one, "actions": {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}"}}}
            for one in asked["objects"]
        ]
        self.answer({"transfer": "basic", "objects": actions})

    def commit(self, repository: str, body: bytes) -> None:
        self.server.calls.append("commit")
        held = self.server.files.setdefault(repository, {})
        for line in map(json.loads, body.splitlines()):
            about = line["value"]
            if line["key"] == "header":
                self.server.commits.append(about["summary"])
            elif line["key"] == "file":
                held[about["path"]] = base64.b64decode(about["content"])
            elif line["key"] == "lfsFile":
                held[about["path"]] = self.server.stored[about["oid"]]
        self.answer({"commitUrl": f"{self.server.address}/{repository}/commit/0", "commitOid": "0" * 40})


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[Hub]:
    """The stand-in, in the place of the hub; the constants are what the library read when it was imported."""
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def models(made, tmp_path_factory) -> dict[str, Path]:
    case = "vit-classifier"
    tuned = finetuned(CASES[case], made(case), tmp_path_factory.mktemp("tuned") / "tuned")
    return {"tuned": tuned, "a": made(case), "b": made(case, 2)}


def command(models: dict[str, Path], verb: str = "transport") -> list[object]:
    names = ("--base", models["a"], "--onto", models["b"], "--force-unrelated", "-q")
    return [verb, models["tuned"], *names]


def require_arrived(hub: Hub, repository: str, folder: Path) -> dict[str, bytes]:
    """All files of an output are there, in one commit; only those with paths differ, by these."""
    held = hub.files[repository]
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert held.keys() == here
    differ = {name for name in here if held[name] != (folder / name).read_bytes()}
    assert differ <= {"transfusion.json", "adapter_config.json", PI_FILE}
    assert not [name for name, text in held.items() if os.fsencode(folder.parent) in text]
    assert len(hub.commits) == 1
    return held


def test_a_model_is_uploaded_when_it_is_written(models, tmp_path, hub):
    """In a process of its own, as users have it: the hub is where HF_ENDPOINT says."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    program = [sys.executable, "-m", "transfusion", *map(str, command(models))]
    done = subprocess.run(
        [*program, "-o", "moved", "--push", NEW],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"written to moved\nuploaded to {hub.address}/{NEW}\n" in done.stdout
    assert hub.created == {NEW: "private"}
    assert hub.commits == [f"{models['tuned'].name}, moved onto {models['b'].name}"]
    held = require_arrived(hub, NEW, tmp_path / "moved")
    card = ModelCard(held["README.md"].decode()).data
    assert (card.library_name, card.pipeline_tag) == ("transformers", "image-classification")
    metadata = json.loads(held["transfusion.json"])
    assert metadata["onto"]["path"] == models["b"].name
    (tmp_path / "pi.safetensors").write_bytes(held[PI_FILE])
    assert Alignment.load(tmp_path / "pi.safetensors").digest == metadata["alignment"]["blake3"]
    sent = [call for call in hub.calls if not call.startswith("get ")]
    assert sent == ["create", "validate", "preupload", "batch", *["put"] * len(hub.stored), "commit"]


def test_an_adapter_arrives_with_its_card(made, tmp_path, cli, hub):
    from transport.test_adapter import train_adapter

    a, b = made("llama"), made("llama", 2)
    train_adapter(a, tmp_path / "lora", ["q_proj"])
    lora = tmp_path / "lora"
    moved = ("-o", tmp_path / "moved", "--push", NEW, "--force-unrelated", "--json")
    code, out, err = cli("transport", lora, "--base", a, "--onto", b, *moved)
    assert code == 0, err
    assert json.loads(out)["uploaded"] == f"{hub.address}/{NEW}"
    held = require_arrived(hub, NEW, tmp_path / "moved")
    assert json.loads(held["adapter_config.json"])["base_model_name_or_path"] == b.name
    card = ModelCard(held["README.md"].decode()).data
    assert (card.library_name, card.tags) == ("peft", ["transfusion", "lora"])


def test_a_lora_file_arrives_with_a_card_and_its_record(made, tmp_path, cli, hub):
    from transport.test_lora_formats import FORMATS, write_lora

    a, b = made("flux"), made("flux", 2)
    lora = write_lora(tmp_path / "lora.safetensors", FORMATS["kohya"], a, "flux")
    moved = tmp_path / "moved.safetensors"
    code, _, err = cli(
        "transport", lora, "--base", a, "--onto", b, "-o", moved, "--push", NEW, "--force-unrelated"
    )
    assert code == 0, err
    held = hub.files[NEW]
    assert held.keys() == {"moved.safetensors", "README.md", "transfusion.json"}
    assert held["moved.safetensors"] == moved.read_bytes()
    assert ModelCard(held["README.md"].decode()).data.library_name == "diffusers"
    with safe_open(moved, "pt") as file:
        assert (
            json.loads(file.metadata()["transfusion.json"])["onto"]
            == json.loads(held["transfusion.json"])["onto"]
        )


def test_a_merge_is_uploaded_into_a_repository_that_exists(models, tmp_path, cli, hub):
    hub.created[NEW] = "public"
    code, _, err = cli(*command(models, "merge"), models["tuned"], "-o", tmp_path / "both", "--push", NEW)
    assert code == 0, err
    require_arrived(hub, NEW, tmp_path / "both")
    assert hub.created == {NEW: "public"}


def test_a_repeated_run_is_uploaded(models, tmp_path, cli, hub):
    assert cli(*command(models), "-o", tmp_path / "first")[0] == 0
    assert hub.calls == [], "without the word, nothing is sent"
    again = ("transport", "--from", tmp_path / "first" / "transfusion.json", "-o", tmp_path / "again")
    code, _, err = cli(*again, "--push", NEW)
    assert code == 0, err
    require_arrived(hub, NEW, tmp_path / "again")


def test_a_dry_run_sends_nothing(models, tmp_path, cli, hub):
    assert cli(*command(models), "-o", tmp_path / "moved", "--push", NEW, "--dry-run")[0] == 0
    assert hub.calls == []


@pytest.mark.parametrize(
    ("repository", "reason"),
    [
        ("moved", "does not say whose repository it is"),
        ("me/my/moved", "not the name of a repository"),
        ("me/my moved", "not the name of a repository"),
        ("me/moved--", "not the name of a repository"),
        ("", "not the name of a repository"),
    ],
)
def test_a_wrong_name_is_refused_before_any_work(repository, reason, tmp_path, cli, hub):
    nothing = tmp_path / "not-there"
    for verb in ("transport", "merge"):
        names = ("--base", nothing, "--onto", nothing, "-o", tmp_path / "moved")
        code, _, err = cli(verb, nothing, *names, "--push", repository)
        assert code == 2
        assert "error: --push: " in err
        assert reason in err
        assert "give ORG/NAME" in err
    assert hub.calls == []


def test_what_is_in_no_file_is_not_uploaded():
    with pytest.raises(SettingError, match="`push` without `output`"):
        transport("tuned", base="a", onto="b", push=NEW)


@pytest.mark.parametrize("why", ["no token", "another token", "no right", "nobody there", "offline"])
def test_an_upload_that_fails_says_why_and_leaves_the_output(why, models, tmp_path, cli, hub, monkeypatch):
    said, repository = {
        "no token": ("no token of the hub is here", NEW),
        "another token": ("the hub does not know the token", NEW),
        "no right": ("the token has no right to write there", "others/moved"),
        "nobody there": ("it did not answer, or refused: [Errno", NEW),
        "offline": ("it did not answer, or refused: Cannot reach", NEW),
    }[why]
    if why == "no token":
        monkeypatch.delenv("HF_TOKEN")
    elif why == "another token":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
    elif why == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif why == "nobody there":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    moved = tmp_path / "moved"
    code, out, err = cli(*command(models), "-o", moved, "--push", repository)
    warning, *_, error, hint = err.splitlines()
    assert warning.startswith("warning: no")  # of the token, or else of π
    assert (code, out) == (1, "")
    assert error.startswith(f"error: {moved} is written, but was not uploaded to {repository} ({said}"), error
    assert hint.startswith("hint: ")
    assert f"'hf upload {repository} {moved} --private --exclude transfusion.json'" in hint
    assert ("no token of the hub is here" in warning) == (why == "no token")
    assert (moved / "model.safetensors").is_file()
    assert hub.files == {}


def test_an_interrupted_upload_leaves_the_output(models, tmp_path, cli, hub, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), 2)

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", interrupted)
    code, _, err = cli(*command(models), "-o", tmp_path / "moved", "--push", NEW)
    assert code == 130
    assert err.endswith(f"\ninterrupted; {tmp_path / 'moved'} is complete, and was not uploaded\n")
    assert (tmp_path / "moved" / "model.safetensors").is_file()


def test_no_part_of_an_upload_names_the_users_own_inputs(models, tmp_path, cli, hub):
    """Methods that compare activations keep their place, and what they are, in π."""
    own = tmp_path / "own.safetensors"
    save_file({"pixel_values": torch.randn(64, 3, 12, 12)}, own)
    words = ["--method", "functional", "--calibrate", own, "-o", tmp_path / "moved", "--push", NEW]
    code, _, err = cli(*command(models), *words)
    assert code == 0, err
    held = require_arrived(hub, NEW, tmp_path / "moved")
    assert str(tmp_path).encode() in (tmp_path / "moved" / PI_FILE).read_bytes()
    assert not [name for name, content in held.items() if str(tmp_path).encode() in content]
