"""etcd's own tools and locks: etcdctl sees what dsched writes and the other way round; users; TLS.

Each cluster here is of the test alone, because a password or a certificate changes all of it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.clock import SystemClock
from dsched.config import RegistryConfig
from dsched.errors import ConfigError, RegistryError
from dsched.registry import open_registry
from dsched.testing.etcd_nodes import NO_ETCD, EtcdNodes, is_etcd_there, running_etcd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_etcd_there(), reason=NO_ETCD),
    pytest.mark.skipif(shutil.which("etcdctl") is None, reason="no etcdctl (etcd-client)"),
]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[EtcdNodes]:
    with running_etcd(tmp_path / "etcd") as nodes:
        yield nodes


def etcdctl(nodes: EtcdNodes, *args: str, text: str | None = None) -> str:
    """Run etcd's own client; return what it prints."""
    command = ["etcdctl", "--endpoints", nodes.nodes[0].url, *args]
    env = os.environ | {"ETCDCTL_API": "3"}
    done = subprocess.run(command, env=env, input=text, capture_output=True, text=True, check=True)
    return done.stdout


async def test_etcdctl_reads_what_we_write_and_we_what_it_writes(nodes: EtcdNodes) -> None:
    """Keys, values, leases and revisions are etcd's own, with nothing added."""
    registry = open_registry(nodes.url("prod/eu"), clock=SystemClock())
    lease = await registry.grant_lease(60)
    revision = await registry.put("engines/a", b'{"x": 1}', lease_id=lease)
    document = json.loads(etcdctl(nodes, "get", "/prod/eu/engines/a", "-w", "json"))
    leases = etcdctl(nodes, "lease", "list")
    etcdctl(nodes, "put", "/prod/eu/engines/b", "theirs")
    etcdctl(nodes, "put", "/prod/euro", "not ours")
    listing = await registry.list_entries("")
    etcdctl(nodes, "lease", "revoke", f"{lease:x}")
    after = await registry.list_entries("")
    await registry.close()

    (kv,) = document["kvs"]
    assert (kv["mod_revision"], kv["lease"]) == (revision, lease)
    assert f"{lease:x}" in leases
    assert [(each.key, each.value) for each in listing.entries] == [
        ("engines/a", b'{"x": 1}'),
        ("engines/b", b"theirs"),
    ]
    assert [each.key for each in after.entries] == ["engines/b"]


async def test_a_user_with_a_password_is_let_in_and_nobody_else(
    nodes: EtcdNodes, tmp_path: Path
) -> None:
    """A restart of etcd makes it forget its tokens; we log in again."""
    password_file = tmp_path / "password"
    password_file.write_text("geheim\n")
    etcdctl(nodes, "user", "add", "root:geheim")
    etcdctl(nodes, "user", "grant-role", "root", "root")
    etcdctl(nodes, "auth", "enable")
    config = RegistryConfig(user="root", password_file=str(password_file))
    registry = open_registry(nodes.url(), clock=SystemClock(), config=config)
    await registry.put("k", b"1")
    nodes.nodes[0].kill()
    nodes.nodes[0].start("n0=" + nodes.nodes[0].peer_url)
    for _ in range(100):
        try:
            await registry.put("k", b"2")
            break
        except RegistryError:
            continue
    entry = await registry.get("k")
    await registry.close()

    assert entry is not None
    assert entry.value == b"2"
    password_file.write_text("falsch")
    for wrong in (config, RegistryConfig()):
        registry = open_registry(nodes.url(), clock=SystemClock(), config=wrong)
        with pytest.raises(RegistryError, match=r"authentication failed|user name is empty"):
            await registry.get("k")
        await registry.close()


def test_a_password_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Before any endpoint is asked."""
    config = RegistryConfig(user="root", password_file=str(tmp_path / "none"))

    with pytest.raises(ConfigError, match=r"^\$\.registry\.password_file: .*No such file"):
        open_registry("etcd://127.0.0.1:1", clock=SystemClock(), config=config)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-out", str(paths[0]), "-keyout", str(paths[1])),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return paths


async def test_calls_are_encrypted_and_the_other_side_is_checked(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """With the right authority it works; with none of ours the fault is named."""
    cert, key = certificate
    nodes = EtcdNodes(tmp_path / "etcd")
    (node,) = nodes.nodes
    node.make_secure(cert=cert, key=key)
    nodes.start()
    try:
        config = RegistryConfig(ca_file=str(cert))
        registry = open_registry(nodes.url(), clock=SystemClock(), config=config)
        revision = await registry.put("k", b"v")
        entry = await registry.get("k")
        await registry.close()
        plain = open_registry(nodes.url(), clock=SystemClock())
        with pytest.raises(RegistryError, match=f"http://{node.endpoint}: "):
            await plain.get("k")
        await plain.close()
    finally:
        nodes.kill()

    assert entry is not None
    assert (entry.value, entry.mod_revision) == (b"v", revision)
