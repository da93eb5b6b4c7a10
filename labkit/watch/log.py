"""``__consumer_offsets`` as Spark reads it: as a stream, or in batch with every group folded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from labkit.watch.decode import SCHEMA, condense, decode
from labkit.watch.fold import Tables
from labkit.watch.group import dump, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OFFSETS = "__consumer_offsets"
COLUMNS = ["key", "value", "timestamp", "partition", "offset"]

# The C client's security settings as the Java client calls them, and where it wants the content.
_SAME = ("security.protocol", "sasl.mechanism", "ssl.key.password")
_FILES = {
    "ssl.ca.location": "ssl.truststore.certificates",
    "ssl.certificate.location": "ssl.keystore.certificate.chain",
    "ssl.key.location": "ssl.keystore.key",
}


def java_settings(client: dict[str, Any]) -> dict[str, str]:
    """Return a C client's security settings as the Java client wants them."""
    found = {key: str(client[key]) for key in _SAME if key in client}
    for key, name in _FILES.items():
        if key in client:
            found[name] = Path(client[key]).read_text()
            found[f"{name.rsplit('store', 1)[0]}store.type"] = "PEM"
    if "sasl.username" in client:
        module = "scram.Scram" if "SCRAM" in client.get("sasl.mechanism", "") else "plain.Plain"
        user, password = (
            str(client.get(key, "")).replace("\\", "\\\\").replace('"', '\\"')
            for key in ("sasl.username", "sasl.password")
        )
        found["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module}LoginModule required "
            f'username="{user}" password="{password}";'
        )
    return found


def options(
    bootstrap: str, client: dict[str, Any], partitions: Iterable[int], first: Any = "earliest"
) -> dict[str, str]:
    """Return the options of Spark's Kafka source for the offsets topic."""
    # Not subscribe: that would join a group, and so write into the very topic that is read.
    settings = {
        "kafka.bootstrap.servers": bootstrap,
        "assign": json.dumps({OFFSETS: sorted(partitions)}),
        "startingOffsets": first if isinstance(first, str) else json.dumps({OFFSETS: first}),
        "failOnDataLoss": "false",  # it is compacted: offsets are missing, and that is no loss
        "fetchOffset.numRetries": "1",
        "kafka.isolation.level": "read_committed",
        "kafka.default.api.timeout.ms": "4000",
        "kafka.request.timeout.ms": "3000",
    }
    return settings | {f"kafka.{k}": v for k, v in java_settings(client).items()}


def tables(records: DataFrame, ids: dict[str, str] | None = None) -> Tables:
    """Decode raw records of an offsets topic and fold each group, wherever Spark runs.

    ``records`` has key, value, timestamp, partition and offset, from Kafka or from any recording of
    it; ``ids`` maps topic ids to names, which the server-side protocol's records lack.
    """
    events = records.select(*COLUMNS).mapInArrow(lambda raw: condense(decode(raw)), SCHEMA)
    folded = events.groupBy("group").applyInArrow(fold_group(), "told string").collect()
    made = Tables()
    made.ids = dict(ids or {})
    for row in folded:
        told = json.loads(row.told)
        made.now = max(made.now, told["now"])
        made.unknown += told["unknown"]
        made.groups |= {group["name"]: load(group) for group in told["groups"]}
    return made


def fold_group() -> Callable[[pa.Table], pa.Table]:
    """Return the function that folds one group's events for Spark's ``applyInArrow``."""

    def run(events: pa.Table) -> pa.Table:
        made = Tables()
        made.take(events.sort_by("log_offset").to_batches())
        told = {
            "now": made.now,
            "unknown": made.unknown,
            "groups": [dump(group) for group in made.groups.values()],
        }
        return pa.table({"told": [json.dumps(told)]})

    return run
