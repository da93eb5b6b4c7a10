"""Kafka's own command-line tools: which there are, how to call them, what the log dump says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd

from labkit import runtime
from labkit.cluster.guard import tether
from labkit.errors import LabError, nearest
from labkit.progress import Progress

_T, _C = "org.apache.kafka.tools", "org.apache.kafka.tools.consumer"
TOOLS = {
    "kafka-acls": f"{_T}.AclCommand",
    "kafka-broker-api-versions": f"{_T}.BrokerApiVersionsCommand",
    "kafka-client-metrics": f"{_T}.ClientMetricsCommand",
    "kafka-cluster": f"{_T}.ClusterTool",
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-console-consumer": f"{_C}.ConsoleConsumer",
    "kafka-console-producer": f"{_T}.ConsoleProducer",
    "kafka-console-share-consumer": f"{_C}.ConsoleShareConsumer",
    "kafka-consumer-groups": f"{_C}.group.ConsumerGroupCommand",
    "kafka-consumer-perf-test": f"{_T}.ConsumerPerformance",
    "kafka-delegation-tokens": f"{_T}.DelegationTokenCommand",
    "kafka-delete-records": f"{_T}.DeleteRecordsCommand",
    "kafka-dump-log": f"{_T}.DumpLogSegments",
    "kafka-e2e-latency": f"{_T}.EndToEndLatency",
    "kafka-features": f"{_T}.FeatureCommand",
    "kafka-get-offsets": f"{_T}.GetOffsetShell",
    "kafka-groups": f"{_T}.GroupsCommand",
    "kafka-leader-election": f"{_T}.LeaderElectionCommand",
    "kafka-log-dirs": f"{_T}.LogDirsCommand",
    "kafka-metadata-quorum": f"{_T}.MetadataQuorumCommand",
    "kafka-producer-perf-test": f"{_T}.ProducerPerformance",
    "kafka-reassign-partitions": f"{_T}.reassign.ReassignPartitionsCommand",
    "kafka-replica-verification": f"{_T}.ReplicaVerificationTool",
    "kafka-share-consumer-perf-test": f"{_T}.ShareConsumerPerformance",
    "kafka-share-groups": f"{_C}.group.ShareGroupCommand",
    "kafka-storage": "kafka.tools.StorageTool",
    "kafka-streams-application-reset": f"{_T}.StreamsResetter",
    "kafka-streams-groups": f"{_T}.streams.StreamsGroupCommand",
    "kafka-topics": f"{_T}.TopicCommand",
    "kafka-transactions": f"{_T}.TransactionsCommand",
    "kafka-verifiable-consumer": f"{_T}.VerifiableConsumer",
    "kafka-verifiable-producer": f"{_T}.VerifiableProducer",
    "kafka-verifiable-share-consumer": f"{_T}.VerifiableShareConsumer",
}
_NO_SERVER = {"kafka-dump-log", "kafka-storage"}  # these read files, or a configuration
_SERVER_OPTION = {"kafka-replica-verification": "--broker-list"}  # all others: --bootstrap-server
_SERVER_GIVEN = {"--bootstrap-server", "--bootstrap-controller", "--broker-list", "--help"}


class Text(str):
    """A text that a notebook shows as it is, line by line."""

    def __repr__(self) -> str:
        return str(self)


def main_class(name: str) -> str:
    """Return the Java class behind a tool, with or without ``.sh`` at the end of its name."""
    try:
        return TOOLS[name.removesuffix(".sh")]
    except KeyError:
        raise LabError(
            f"no tool is called {name!r}{nearest(name, TOOLS)}",
            f"use one of: {', '.join(sorted(TOOLS))}",
        ) from None


def run_tool(command: str, bootstrap: str, input: str | None, timeout: float) -> Text:
    """Run one of Kafka's tools and return what it printed."""
    try:
        name, *arguments = shlex.split(command) or [""]
    except ValueError as error:
        raise LabError(
            f"cannot read the command {command!r}: {error}", "quote it as you would in a shell"
        ) from None
    main, name = main_class(name), name.removesuffix(".sh")
    if name not in _NO_SERVER and not _SERVER_GIVEN & {a.split("=")[0] for a in arguments}:
        server = [_SERVER_OPTION.get(name, "--bootstrap-server"), bootstrap]
        # Tools with subcommands want it before them, but for this one.
        arguments = arguments + server if name == "kafka-cluster" else server + arguments
    return _run(name, main, arguments, input, timeout)


def _run(name: str, main: str, arguments: list[str], input: str | None, timeout: float) -> Text:
    from labkit import aot

    argv = runtime.jvm("256m", aot.flags("tool"), main, *arguments)
    with Progress(name) as progress:
        progress.step("running")
        process = tether(
            argv,
            stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            out, err = process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            last = f", its last line: {out.strip().splitlines()[-1][:200]}" if out.strip() else ""
            raise LabError(
                f"{name} was still running after {timeout:.0f} s and was stopped{last}",
                "give it an end (--max-messages, --timeout-ms), or more time with timeout=",
            ) from None
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode:
        raise LabError(
            f"{name} failed: {_reason(out + err)}",
            f'run("{name} --help") lists what it takes; it exited with {process.returncode}',
        )
    return Text(out.rstrip("\n"))


def _reason(output: str) -> str:
    # A tool says what is wrong first and prints its options or a Java trace after it.
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("at ")]
    for line in lines:
        if re.search(
            r"error|exception|missing|not a recognized|invalid|required|could not", line, re.I
        ):
            return re.sub(r"\(?(java|org)(\.\w+)+\.(\w+(Exception|Error)):? ?", r"\3: ", line)[:300]
    return lines[0][:300] if lines else "it printed nothing"


def segments(files: list[Path]) -> pd.DataFrame:
    """Read segment files with kafka-dump-log."""
    arguments = ["--print-data-log", "--deep-iteration", "--files", ",".join(map(str, files))]
    dump = _run("kafka-dump-log", TOOLS["kafka-dump-log"], arguments, None, 120) if files else ""
    rows = _parse(dump)
    columns = [
        "partition",
        "file",
        "bytes",
        "batch",
        "position",
        "batch_bytes",
        "codec",
        "offset",
        "timestamp",
        "key",
        "value",
        "headers",
    ]
    table = pd.DataFrame(rows, columns=columns)
    table["timestamp"] = pd.to_datetime(table["timestamp"], unit="ms")
    return table.sort_values(["partition", "offset"], ignore_index=True)


def _parse(dump: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    path, batch = Path(), {}
    for line in dump.splitlines():
        if line.startswith("Dumping "):
            path = Path(line.removeprefix("Dumping "))
        elif line.startswith("baseOffset: "):
            batch = dict(re.findall(r"(\w+): (\S+)", line))
        elif line.startswith("| offset: "):
            head, _, payload = line.partition(" payload: ")
            head, _, key = head.partition(" key: ")
            record = dict(re.findall(r"(\w+): (\S+)", head))
            headers = re.search(r"headerKeys: \[(.*?)\]", head)
            rows.append(
                {
                    "partition": int(path.parent.name.rpartition("-")[2]),
                    "file": path.name,
                    "bytes": path.stat().st_size,
                    "batch": int(batch["baseOffset"]),
                    "position": int(batch["position"]),
                    "batch_bytes": int(batch["size"]),
                    "codec": batch["compresscodec"],
                    "offset": int(record["offset"]),
                    "timestamp": int(record.get("CreateTime") or record.get("LogAppendTime") or 0),
                    "key": key if record["keySize"] != "-1" else None,
                    "value": payload if record["valueSize"] != "-1" else None,
                    "headers": headers[1] if headers else "",
                }
            )
    return rows
