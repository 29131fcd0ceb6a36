"""What one machine keeps under `var`, and what it refuses to start with."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from accounts.settings import AccountsSettings
from engine.errors import ModelRefused
from infra.errors import (
    AlreadyRunning,
    NotRunning,
    PortBusy,
    PublicBindRefused,
    RedisMissing,
    SetUpFailed,
    WrongSettings,
)
from infra.local import checkpoints, preflight, ready_file, secret_store
from infra.local.clean import clean
from infra.local.hub import is_hub_name
from infra.local.instance_lock import LOCK_FILE, instance_lock
from infra.local.model_files import read_model_facts
from infra.local.redis_server import configuration, find_redis_server
from infra.settings import InfraSettings

HOLD = """
import sys, time
from pathlib import Path
from infra.local.instance_lock import instance_lock
with instance_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_instance_a_directory_and_a_killed_one_locks_nobody_out(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(AlreadyRunning, match=f"process {holder.pid}"), instance_lock(tmp_path):
            pass
        with pytest.raises(AlreadyRunning):
            clean(tmp_path)
        holder.send_signal(signal.SIGKILL)
    with instance_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()
    assert clean(tmp_path) == f"removed {tmp_path}"
    assert not tmp_path.exists()


def test_what_is_kept_is_for_its_owner_only(tmp_path: Path) -> None:
    """The database and the logs are made by others, with the modes of those."""
    with instance_lock(tmp_path / "var"):
        assert (tmp_path / "var").stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o755)
    with instance_lock(tmp_path):  # a folder of the operator keeps its mode
        assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_clean_leaves_a_directory_alone_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    assert "left alone" in clean(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_secrets_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    made = secret_store.load_or_make(tmp_path)
    assert secret_store.load_or_make(tmp_path) == made
    assert (tmp_path / "secrets.json").stat().st_mode & 0o777 == 0o600
    assert made.api_key_pepper not in repr(made)
    kept = secret_store.with_keys(tmp_path, made, demo="a", operator="b")
    assert secret_store.load_or_make(tmp_path) == kept


def test_damaged_secrets_stop_the_start_and_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text("{")
    with pytest.raises(SetUpFailed, match=r"secrets\.json cannot be read"):
        secret_store.load_or_make(tmp_path)
    assert (tmp_path / "secrets.json").read_text() == "{"


def test_a_busy_port_is_one_line_that_names_another(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = InfraSettings(NCOMPASS_VAR=tmp_path, NCOMPASS_PORT=port)
        with pytest.raises(PortBusy, match=f"make run PORT={port + 1}"):
            preflight.listen(settings)


def test_a_public_address_needs_verified_addresses() -> None:
    public = InfraSettings(host="0.0.0.0")
    with pytest.raises(PublicBindRefused, match="e-mail verification is off"):
        preflight.check_settings(public, AccountsSettings(is_email_verification_on=False))
    preflight.check_settings(public, AccountsSettings(is_email_verification_on=True))


def test_several_api_processes_need_postgresql() -> None:
    with pytest.raises(WrongSettings, match="needs PostgreSQL"):
        preflight.check_settings(InfraSettings(api_processes=2), AccountsSettings())


def test_port_and_var_are_read_with_and_without_the_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PORT", "8123")
    monkeypatch.setenv("VAR", "elsewhere")
    settings = InfraSettings()
    assert (settings.port, settings.var) == (8123, Path("elsewhere"))


def test_ready_json_is_private_and_its_absence_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="make run"):
        ready_file.read(tmp_path)
    ready = ready_file.Ready("u", "k", "a", "m", "r", "d", "me", {"api": 1})
    ready_file.write(tmp_path, ready)
    assert ready_file.read(tmp_path) == ready
    assert (tmp_path / "ready.json").stat().st_mode & 0o777 == 0o600
    assert "k" not in repr(ready).split("(")[1]


def fake_redis(folder: Path, answer: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "redis-server").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (folder / "redis-server").chmod(0o755)


def test_redis_on_the_path_is_taken_before_that_of_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_redis(tmp_path, "Redis server v=7.2.4 sha=0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = find_redis_server()
    assert (found.origin, found.version) == ("on the PATH", "7.2")


def test_an_old_redis_is_passed_over_and_named_when_it_is_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_redis(tmp_path, "Redis server v=5.0.14 sha=0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("infra.local.redis_server.importlib.util.find_spec", lambda name: None)
    with pytest.raises(RedisMissing, match=r"the one on the PATH is 5\.0"):
        find_redis_server()


def test_the_redis_password_goes_through_standard_input() -> None:
    text = configuration(6400, "s3cret", Path("/x y")).decode()
    assert "requirepass s3cret\n" in text
    assert "bind 127.0.0.1\n" in text
    assert 'dir "/x y"\n' in text


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "no config.json"),
        ({"config.json": "nonsense"}, "is not JSON"),
        ({"config.json": "[]"}, "is not a JSON object"),
        ({"config.json": "{}"}, "no tokenizer.json"),
        ({"config.json": "{}", "tokenizer.json": "{}"}, r"no \*\.safetensors"),
    ],
)
def test_a_checkpoint_that_cannot_be_hosted_is_refused_with_the_reason(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelRefused, match=complaint):
        read_model_facts(tmp_path)


def test_other_weights_are_another_revision(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 2048, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "m.safetensors").write_bytes(b"1")
    first = read_model_facts(tmp_path)
    assert (first.architecture, first.context_length) == ("LlamaForCausalLM", 2048)
    (tmp_path / "m.safetensors").write_bytes(b"12")
    assert read_model_facts(tmp_path).revision != first.revision


def test_a_model_to_host_is_a_directory_a_gguf_file_or_a_name_on_a_hub(tmp_path: Path) -> None:
    there = tmp_path / "owner--model"
    there.mkdir()
    found = checkpoints.fetch(str(there), tmp_path, print)
    assert (found.name, found.directory) == ("owner/model", there)
    assert is_hub_name("owner/other-1.5B")
    with pytest.raises(ModelRefused, match="does not exist"):
        checkpoints.fetch("/no/such.gguf", tmp_path, print)
    for nothing in (
        "nothing-of-the-kind",
        "/mistyped",
        "./mistyped",
        "~/mistyped",
        "../up",
        "a/b/c",
    ):
        assert not is_hub_name(nothing)
        with pytest.raises(ModelRefused, match="is no directory"):
            checkpoints.fetch(nothing, tmp_path, print)


def test_a_gguf_file_that_cannot_be_read_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a GGUF file")
    with pytest.raises(SetUpFailed, match=r"broken\.gguf could not be converted"):
        checkpoints.fetch(str(broken), tmp_path / "models", lambda line: None)
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "environment", "complaint"),
    [
        (["up"], {"PORT": "eighty"}, "the setting NCOMPASS_PORT of InfraSettings is wrong"),
        (["up"], {"NCOMPASS_HOST": "0.0.0.0"}, "can be reached from other machines"),
        (["status"], {}, "nothing is running on"),
        (["reconcile"], {}, "the database does not answer"),
        (
            ["credits", "adjust", "--organization", "x", "--amount", "lots", "--reason", "r"],
            {},
            "not an amount in dollars",
        ),
    ],
)
def test_a_command_that_cannot_work_says_why_in_one_line(
    tmp_path: Path, command: list[str], environment: dict[str, str], complaint: str
) -> None:
    ncompass = Path(sys.executable).with_name("ncompass")
    ran = subprocess.run(
        [str(ncompass), *command],
        env=os.environ | {"VAR": str(tmp_path / "var")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert complaint in ran.stderr
    assert ran.stderr.count("\n") == 1, ran.stderr


def test_accepted_connections_never_hold_back_a_small_segment(tmp_path: Path) -> None:
    settings = InfraSettings(NCOMPASS_VAR=tmp_path, NCOMPASS_PORT=preflight.free_port())
    with (
        preflight.listen(settings) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
