"""Settings with defaults, read once from environment variables."""

import dataclasses
import os
from typing import Any

MIB = 1 << 20
COLLECTIVES = "", "mpi", "mpi-on-device", "devices"

# A variable is JDISTGRAD_ and its setting's name in capitals, but for these.
NAMES = {"heartbeat_seconds": "HEARTBEAT", "silence_seconds": "SILENCE", "in_flight_bytes": "IN_FLIGHT"}


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Settings of this process.

    Arguments:
      heartbeat_seconds: how often a silent worker that another waits for is asked for a sign of life.
      silence_seconds: how long a worker may be silent before it is given up.
      same_script: whether all processes must have been started with the same script.
      devices: whether ``init`` starts ``jax.distributed`` by default.
      in_flight_bytes: how many bytes of arguments may be in calls that are not answered, before a program's next call
        waits.
      survive: whether ``init`` lets the others go on without a lost worker by default.
      host: the name or address by which other nodes find this process, where that is not the node's own name.
      debug: whether processes show ``jdistgrad stacks`` what they wait for.
      debug_dir: the folder for these files; "" for one in the system's temporary folder.
      collectives: the default collectives of ``DataParallel`` and the like: "mpi", "mpi-on-device", "devices", or ""
        to choose by what the job has.
    """

    heartbeat_seconds: float = 5.0
    silence_seconds: float = 60.0
    same_script: bool = True
    devices: bool = False
    survive: bool = False
    collectives: str = ""
    host: str = ""
    in_flight_bytes: float = 4096.0 * MIB
    debug: bool = False
    debug_dir: str = ""


def _read() -> Settings:
    given = dict[str, Any]()
    for field in dataclasses.fields(Settings):
        variable = f"JDISTGRAD_{NAMES.get(field.name, field.name.upper())}"
        text = os.environ.get(variable)
        if text is not None:
            value, expected = _value(field.name, type(field.default), text)
            if value is None:
                raise ValueError(f"the environment variable {variable} must be {expected}, not {text!r}")
            given[field.name] = value
    return Settings(**given)


def _value(name: str, kind: Any, text: str) -> tuple[Any, str]:
    """Return the value that a text gives a setting, None if it gives none; and what is expected."""
    if kind is bool:
        return {"0": False, "1": True}.get(text), "0 or 1"
    if kind is float:
        unit = "MiB" if name == "in_flight_bytes" else "seconds"
        try:
            value = float(text) * (MIB if unit == "MiB" else 1)
        except ValueError:
            value = 0.0
        return value if value > 0 else None, f"a positive number of {unit}"
    refused = name == "collectives" and text not in COLLECTIVES
    return None if refused else text, " or ".join(COLLECTIVES[1:])


settings = _read()
