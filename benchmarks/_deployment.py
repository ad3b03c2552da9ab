"""A federation of real processes on this machine, for tests and benchmarks.

What a site with several machines does by hand (docs/deployment.md): start the SuperLink, start a
SuperNode per data holder, register the nodes' keys where nodes must authenticate, and submit the
app with ``flwr run``.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Any, Self

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flwr_perdl.core.checks import check_count
from perdl_experiments._run_config import all_keys, to_key

HOST = "127.0.0.1"
#: Name of the SuperLink in the private Flower configuration.
_LINK = "lan"
_PATIENCE = 60.0  # seconds until a process must be up

# Flower looks for the assignments without importing anything.
_APP = """\
from perdl_experiments import client_app, server_app

client = client_app.app
server = server_app.app
"""


class Deployment:
    """A SuperLink and SuperNodes on loopback, each a process of its own.

    A context manager: leaving it ends all processes, also after an error.

    Parameters
    ----------
    folder : str or Path
        Logs, keys, certificates and the app that is submitted; made when missing.
    n_nodes : int, default 3
        Number of SuperNodes; each gets ``partition-id`` and ``num-partitions``.
    tls : bool, default False
        Encrypt all connections with a certificate made here, and let only registered SuperNodes
        join.
    node_config : callable, optional
        ``partition -> mapping``: further entries of a node's config, such as its own data file.
    app : str, optional
        Source of the app that is run, with a ClientApp ``client`` and a ServerApp ``server``; by
        default the project's own, which takes an experiment.

    Raises
    ------
    RuntimeError
        If a process does not come up; the end of its log is in the message.
    """

    def __init__(
        self,
        folder: str | Path,
        n_nodes: int = 3,
        *,
        tls: bool = False,
        node_config: Callable[[int], Mapping[str, Any]] | None = None,
        app: str = _APP,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.n_nodes = check_count("n_nodes", n_nodes, 1)
        self.tls = tls
        self.node_config = node_config or (lambda partition: {})
        self.app = app
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.node_ids: dict[int, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports: dict[str, int] = {}
        self._environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds until a message has its process
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    # Life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start the SuperLink and all SuperNodes."""
        try:
            (self.folder / "flower").mkdir(parents=True, exist_ok=True)
            if self.tls:
                make_certificates(self.folder / "certificates")
            self._start_link()
            self._write_app()
            for partition in range(self.n_nodes):
                if self.tls:
                    name = f"node-{partition}"
                    self.node_ids[partition] = self.register(self.make_key(name), name)
                self.start_node(partition)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes."""
        self.stop()

    def stop(self) -> None:
        """End the SuperNodes, then the SuperLink, with all that they started."""
        running = self._processes[::-1]
        # Flower gives the apps' processes sessions of their own: no signal to a group is theirs
        theirs = _started_by(running)
        for process in running:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + 10
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0))
            _signal_group(process, signal.SIGKILL)
            process.wait()
        while _kill(theirs) and time.monotonic() < deadline + 5:
            time.sleep(0.05)
        self._processes.clear()
        self.nodes.clear()

    @staticmethod
    def kill(node: subprocess.Popen[bytes]) -> None:
        """End a SuperNode, and what it started, at once, as a crash does (SIGKILL)."""
        _signal_group(node, signal.SIGKILL)
        node.wait()

    def online(self) -> set[str]:
        """Return the ids of the SuperLink's SuperNodes; a dead one counts for a minute more."""
        listed = self._call(["flwr", "supernode", "list", _LINK, "--format", "json"]).stdout
        try:
            nodes = json.loads(listed)["nodes"]
        except (ValueError, KeyError):
            raise RuntimeError(f"the SuperLink does not list its nodes: {_tail(listed)}") from None
        return {node["node-id"] for node in nodes if node["status"] == "online"}

    # Parts -----------------------------------------------------------------------------------

    def _start_link(self) -> None:
        self._ports = {
            name: free_port() for name in ("link", "fleet", "control", "serverapp", "unused")
        }
        command = ["flower-superlink", *self._link_addresses()]
        if self.tls:
            folder = self.folder / "certificates"
            command += ["--ssl-ca-certfile", str(folder / "ca.crt")]
            command += ["--ssl-certfile", str(folder / "server.pem")]
            command += ["--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth"]
        else:
            command.append("--insecure")
        link = self._start("superlink", command)
        self._await_port(link, "superlink", self._control_port)

    def _link_addresses(self) -> list[str]:
        if takes("flower-superlink", "--port"):
            return ["--host", HOST, "--port", str(self._ports["link"])]
        return [  # 1.26: an address for each interface
            *("--fleet-api-address", f"{HOST}:{self._ports['fleet']}"),
            *("--control-api-address", f"{HOST}:{self._ports['control']}"),
            *("--serverappio-api-address", f"{HOST}:{self._ports['serverapp']}"),
        ]

    @property
    def _control_port(self) -> int:
        new = takes("flower-superlink", "--port")
        return self._ports["link" if new else "control"]

    @property
    def address(self) -> str:
        """Where SuperNodes find the SuperLink."""
        new = takes("flower-superlink", "--port")
        return f"{HOST}:{self._ports['link' if new else 'fleet']}"

    def start_node(
        self, partition: int, *, key: str | None = None, name: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a partition; also to bring one back that died.

        Parameters
        ----------
        partition : int
            Its partition id.
        key : str, optional
            Name of the key that it shows, with ``tls``; ``node-PARTITION`` by default.
        name : str, optional
            Name of its log; ``node-PARTITION`` by default.
        """
        config = {
            "partition-id": partition,
            "num-partitions": self.n_nodes,
            **self.node_config(partition),
        }
        command = ["flower-supernode", "--superlink", self.address]
        if takes("flower-supernode", "--port"):
            command += ["--host", HOST, "--port", str(free_port())]
        else:
            command += ["--clientappio-api-address", f"{HOST}:{free_port()}"]
        command += ["--node-config", " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())]
        if self.tls:
            secret = self.folder / "keys" / (key or f"node-{partition}")
            command += ["--root-certificates", str(self.folder / "certificates" / "ca.crt")]
            command += ["--auth-supernode-private-key", str(secret)]
            if takes("flower-supernode", "--ssl-certfile"):
                folder = self.folder / "certificates"
                command += ["--ssl-ca-certfile", str(folder / "ca.crt")]
                command += ["--ssl-certfile", str(folder / "server.pem")]
                command += ["--ssl-keyfile", str(folder / "server.key")]
        else:
            command.append("--insecure")
        name = name or f"node-{partition}"
        process = self._start(name, command)
        self.nodes.append(process)
        return process

    def make_key(self, name: str) -> Path:
        """Make a key pair for a SuperNode, and return the public key's file."""
        return make_key(self.folder / "keys", name)

    def register(self, public_key: Path, name: str) -> int:
        """Let the SuperLink accept the SuperNode with this key, and return the key's node id."""
        command = ["flwr", "supernode", "register", str(public_key), _LINK, "--format", "json"]
        if takes("flwr supernode register", "--name"):
            command += ["--name", name]
        said = self._call(command).stdout
        try:
            return int(json.loads(said)["node-id"])
        except (ValueError, KeyError):
            raise RuntimeError(f"SuperNode {name} could not be registered: {_tail(said)}") from None

    # The app ---------------------------------------------------------------------------------

    def run(self, run_config: Mapping[str, Any], *, timeout: float | None = None) -> str:
        """Submit the app, follow its log, and return it; also from several threads at once.

        Parameters
        ----------
        run_config : mapping
            ``experiment``, ``out`` (an absolute path) and the experiment's options.
        timeout : float, optional
            Seconds after which the run is stopped.

        Returns
        -------
        str
            The app's log.

        Raises
        ------
        RuntimeError
            If the run failed; the end of the log is in the message.
        subprocess.TimeoutExpired
            If it took longer than ``timeout``.
        """
        pairs = " ".join(f"{to_key(key)}={json.dumps(value)}" for key, value in run_config.items())
        command = ["flwr", "run", str(self.folder / "app"), _LINK, "--stream"]
        with NamedTemporaryFile(
            "wb", dir=self.folder, prefix="run-", suffix=".log", delete=False
        ) as stream:
            subprocess.run(
                [*command, "--run-config", pairs],
                cwd=self.folder,
                env=self._environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                check=False,
            )
        said = Path(stream.name).read_text(errors="replace")
        status = self._status(said)
        if status != "finished:completed":
            raise RuntimeError(f"the run ended as {status}: {_tail(said)}")
        return said

    def _status(self, said: str) -> str:
        """Return what the SuperLink says of a run with this log (``flwr run`` always exits 0)."""
        command = ["flwr", "ls", _LINK, "--format", "json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, check=False
        )
        try:
            runs = json.loads(done.stdout)["runs"]
        except (ValueError, KeyError):
            return "unknown"
        return next((str(run["status"]) for run in runs if run["run-id"] in said), "not submitted")

    def _write_app(self) -> None:
        """Write the app that is submitted, and tell Flower's commands where the SuperLink is."""
        app = self.folder / "app"
        app.mkdir(parents=True, exist_ok=True)
        (app / "perdl_deployment.py").write_text(self.app)
        keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in all_keys().items())
        link = [f'address = "{HOST}:{self._control_port}"']
        if self.tls:
            link.append(f'root-certificates = "{self.folder / "certificates" / "ca.crt"}"')
        else:
            link.append("insecure = true")
        connection = "\n".join(link)
        (app / "pyproject.toml").write_text(
            '[project]\nname = "flwr-perdl-deployment"\nversion = "1.0.0"\n'
            'license = "Apache-2.0"\ndependencies = []\n\n'
            '[tool.flwr.app]\npublisher = "flwr-perdl"\n\n'
            '[tool.flwr.app.components]\nserverapp = "perdl_deployment:server"\n'
            'clientapp = "perdl_deployment:client"\n\n'
            f"[tool.flwr.app.config]\n{keys}\n"
        )
        (self.folder / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "{_LINK}"\n\n[superlink.{_LINK}]\n{connection}\n'
        )

    # Processes -------------------------------------------------------------------------------

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._processes.append(process)
        return process

    def _call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )

    def _await_port(self, process: subprocess.Popen[bytes], name: str, port: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            with socket.socket() as caller:
                caller.settimeout(1.0)
                if caller.connect_ex((HOST, port)) == 0:
                    return
            time.sleep(0.2)
        log = (self.folder / f"{name}.log").read_text(errors="replace")
        raise RuntimeError(f"{name} did not come up within {_PATIENCE:g} s: {_tail(log)}")


def make_certificates(folder: Path) -> None:
    """Make a certificate authority, and a server certificate for this machine's loopback.

    Parameters
    ----------
    folder : Path
        Gets ``ca.crt``, ``server.pem`` and ``server.key`` (readable by the owner only). The
        authority's own key is not kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "flwr-perdl local authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))]

    def builder(name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=365))
        )

    root = builder(issuer, authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    own = builder(subject, server).add_extension(x509.SubjectAlternativeName(names), critical=False)
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    pem = serialization.Encoding.PEM
    for file, certificate in (("ca.crt", root), ("server.pem", own)):
        signed = certificate.sign(authority, hashes.SHA256())
        (folder / file).write_bytes(signed.public_bytes(pem))
    _write_secret(
        folder / "server.key",
        server.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def make_key(folder: Path, name: str) -> Path:
    """Make a SuperNode's key pair (NIST P-384), and return the public key's file.

    Parameters
    ----------
    folder : Path
        Gets ``NAME`` (readable by the owner only) and ``NAME.pub``.
    name : str
        The files' name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    _write_secret(folder / name, secret)
    public = folder / f"{name}.pub"
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return public


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` successive ports of the loopback interface that are free.

    They are below the range from which systems take ports for outgoing connections: a port of that
    range could be in use before the process for which it was chosen listens there.
    """
    for _ in range(100):
        port = 10_000 + secrets.randbelow(22_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as listeners:
            for k in range(count):
                listeners.enter_context(socket.socket()).bind((HOST, port + k))
            return port
    raise RuntimeError(f"found no {count} successive free ports from 10000 to 32000")


def _write_secret(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


_helps: dict[str, str] = {}


def takes(command: str, option: str) -> bool:
    """Return whether a command of the installed Flower knows an option."""
    if command not in _helps:
        folder = Path(sys.executable).parent
        name, *words = shlex.split(command)
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
        _helps[command] = subprocess.run(
            [str(folder / name), *words, "--help"],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        ).stdout
    return option in _helps[command].replace("\n", " ").split()


def _started_by(processes: Iterable[subprocess.Popen[bytes]]) -> list[Any]:
    """Return the processes that others have started, and those that these have started."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(process.pid).children(recursive=True)
    return found


def _kill(processes: Iterable[Any]) -> bool:
    """End processes at once, and return whether one is still alive."""
    alive = False
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            alive |= process.status() != psutil.STATUS_ZOMBIE  # ended; its parent has not asked
    return alive


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _tail(text: str, lines: int = 15) -> str:
    return "\n".join(["", *text.strip().splitlines()[-lines:]])
