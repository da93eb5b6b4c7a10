"""What a broker says when it cannot start, or does not say when it should, in two lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labkit import runtime
from labkit.errors import LabError, nearest

# A broker lists a name that it does not know as well, as if it were a secret; these really are.
SECRETS = {
    "delegation.token.secret.key",
    "sasl.jaas.config",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.client.credentials.client.secret",
    "ssl.key.password",
    "ssl.keystore.certificate.chain",
    "ssl.keystore.key",
    "ssl.keystore.password",
    "ssl.truststore.certificates",
    "ssl.truststore.password",
}
PLUGINS = {"super.users", "allow.everyone.if.no.acl.found"}  # the authorizer's own
PREFIXES = ("listener.name.", "rlmm.config.", "rsm.config.")


def refuse_unknown(config: dict[str, str], listed: Iterable[Any]) -> None:
    """Refuse names that the broker does not know: it would ignore them without a word."""
    known = PLUGINS | SECRETS | {entry.name for entry in listed if not entry.is_sensitive}
    for key in config:
        if key not in known and not key.startswith(PREFIXES):
            raise LabError(
                f"Kafka has no broker setting {key!r}{nearest(key, known)}",
                "correct its name in config=",
            )


def died(broker: int, log: str, folder: Path) -> LabError:
    """Return why a broker ended before it was up, in its own words."""
    if "No space left on device" in log or runtime.is_full(folder):
        return runtime.no_space(folder)
    words = re.search(r"ConfigException: (.+)", log)
    if words:
        return LabError(
            f"the broker refused its configuration: {words[1]}", "correct its value in config="
        )
    lines = [line for line in log.splitlines() if not line.startswith("\tat ")]
    first = next((i for i, line in enumerate(lines) if " ERROR " in line), -12)
    tail = "\n".join(lines[first:][:12]) or "(it is empty)"
    return LabError(f"broker {broker} died while starting", f"the end of its log says why:\n{tail}")
