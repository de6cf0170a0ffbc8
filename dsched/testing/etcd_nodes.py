"""Real etcd for tests: nodes on 127.0.0.1 with free ports, killed and started again one by one.

Only processes that were started here are ever ended, each by its own handle.
"""

import json
import shutil
import signal
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dsched.drivers.local import free_port

START_TIMEOUT_S = 30.0
POLL_S = 0.05
NO_ETCD = "etcd is not installed (Debian: apt-get install etcd-server)"


def is_etcd_there() -> bool:
    """Whether there is an `etcd` to start."""
    return shutil.which("etcd") is not None


class EtcdNode:
    """One etcd process and its folder."""

    def __init__(self, folder: Path, *, name: str, client_port: int, peer_port: int) -> None:
        self.name = name
        self.endpoint = f"127.0.0.1:{client_port}"
        self.peer_url = f"http://127.0.0.1:{peer_port}"
        self.folder = folder
        self._scheme = "http"
        self._extra_args: tuple[str, ...] = ()
        self._tls: ssl.SSLContext | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"{self._scheme}://{self.endpoint}"

    def make_secure(self, *, cert: Path, key: Path) -> None:
        """Have clients use TLS from the next start on."""
        self._scheme = "https"
        self._extra_args = ("--cert-file", str(cert), "--key-file", str(key))
        self._tls = ssl.create_default_context(cafile=str(cert))

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, initial_cluster: str) -> None:
        """Start the process; it may take a moment until it answers."""
        command = [
            *("etcd", "--name", self.name, "--data-dir", str(self.folder / self.name)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", initial_cluster, "--logger", "zap", *self._extra_args),
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL: nothing is said to anybody."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait(timeout=10)

    def freeze(self) -> None:
        """SIGSTOP: its sockets stay open and say nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ask(self, path: str, body: object, *, timeout_s: float = 2.0) -> dict[str, object]:
        """Call the gateway with nothing of dsched's in between. Raises `OSError`."""
        request = urllib.request.Request(self.url + path, data=json.dumps(body).encode())
        opener = urllib.request.build_opener(  # no proxy of the environment
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls)
        )
        with opener.open(request, timeout=timeout_s) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found

    def is_leader(self) -> bool:
        """Whether this node leads, by its own word; `False` when it has no leader or is away."""
        try:
            status = self.ask("/v3/maintenance/status", {})
        except OSError:
            return False
        header = status["header"]
        assert isinstance(header, dict)
        return bool(status.get("leader") == header["member_id"])


class EtcdNodes:
    """A cluster of etcd nodes on this machine."""

    def __init__(self, folder: Path, *, num_nodes: int = 1) -> None:
        self.nodes: list[EtcdNode] = []
        ports = free_ports(2 * num_nodes)
        for index in range(num_nodes):
            client_port, peer_port = ports[2 * index : 2 * index + 2]
            self.nodes.append(
                EtcdNode(folder, name=f"n{index}", client_port=client_port, peer_port=peer_port)
            )

    def url(self, prefix: str = "dsched") -> str:
        """The registry URL with all nodes."""
        return f"etcd://{','.join(node.endpoint for node in self.nodes)}/{prefix}"

    def start(self) -> None:
        """Start every node that does not run, and wait until the cluster writes."""
        initial = ",".join(f"{node.name}={node.peer_url}" for node in self.nodes)
        for node in self.nodes:
            if not node.is_running:
                node.start(initial)
        for node in self.nodes:
            wait_until(partial(_is_writing, node), what=f"etcd on {node.url}")

    def kill(self) -> None:
        """End every node."""
        for node in self.nodes:
            node.kill()

    def leader(self) -> EtcdNode:
        """The node that leads now."""
        found: list[EtcdNode] = []

        def find() -> bool:
            found[:] = [node for node in self.nodes if node.is_running and node.is_leader()]
            return len(found) == 1

        wait_until(find, what="a leader of etcd")
        return found[0]


@contextmanager
def running_etcd(folder: Path, *, num_nodes: int = 1) -> Iterator[EtcdNodes]:
    """A cluster that answers; ended at the end."""
    nodes = EtcdNodes(folder, num_nodes=num_nodes)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.kill()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    return [free_port() for _ in range(count)]


def wait_until(is_so: Callable[[], bool], *, what: str) -> None:
    """Look again and again; `AssertionError` after `START_TIMEOUT_S`."""
    pause = threading.Event()
    for _ in range(int(START_TIMEOUT_S / POLL_S)):
        if is_so():
            return
        pause.wait(POLL_S)
    raise AssertionError(f"waited {START_TIMEOUT_S:g} s in vain for {what}")


def _is_writing(node: EtcdNode) -> bool:
    try:
        node.ask("/v3/kv/put", {"key": "dGVzdA==", "value": ""})
    except OSError:
        return False
    return True
