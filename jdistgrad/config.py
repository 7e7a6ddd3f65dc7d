"""Settings with defaults, read once from environment variables."""

import dataclasses
import os

MIB = 1 << 20
COLLECTIVES = "", "mpi", "mpi-on-device", "devices"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Settings of this process.

    Arguments:
      heartbeat_seconds: how often a silent worker that another waits for is asked for a sign of life.
      silence_seconds: how long a worker may be silent before it is given up.
      same_script: whether all processes must have been started with the same script.
      devices: whether ``init`` starts ``jax.distributed`` where it is not told.
      in_flight_bytes: how many bytes of arguments may be in calls that are not answered, before a program's next call
        waits.
      survive: whether ``init`` lets the others go on without a worker that is lost, where it is not told.
      host: the name or address by which other nodes find this process, where that is not the node's own name.
      debug: whether processes show ``jdistgrad stacks`` what they wait for.
      debug_dir: the folder for what they write; "" for one in the system's temporary folder.
      collectives: the collectives that ``DataParallel`` and the like use where they are not told: "mpi",
        "mpi-on-device", "devices", or "" to choose by what the job has.
    """

    heartbeat_seconds: float = 5.0
    silence_seconds: float = 60.0
    same_script: bool = True
    devices: bool = False
    survive: bool = False
    collectives: str = ""
    host: str = ""
    in_flight_bytes: float = 4096 * MIB
    debug: bool = False
    debug_dir: str = ""


def _read() -> Settings:
    defaults, collectives = Settings(), os.environ.get("JDISTGRAD_COLLECTIVES", "")
    if collectives not in COLLECTIVES:
        expected = " or ".join(filter(None, COLLECTIVES))
        raise ValueError(f"the environment variable JDISTGRAD_COLLECTIVES must be {expected}, not {collectives!r}")
    return Settings(
        heartbeat_seconds=_positive("JDISTGRAD_HEARTBEAT", defaults.heartbeat_seconds, "seconds"),
        silence_seconds=_positive("JDISTGRAD_SILENCE", defaults.silence_seconds, "seconds"),
        in_flight_bytes=MIB * _positive("JDISTGRAD_IN_FLIGHT", defaults.in_flight_bytes / MIB, "MiB"),
        same_script=_switch("JDISTGRAD_SAME_SCRIPT", default=defaults.same_script),
        devices=_switch("JDISTGRAD_DEVICES", default=defaults.devices),
        survive=_switch("JDISTGRAD_SURVIVE", default=defaults.survive),
        collectives=collectives,
        host=os.environ.get("JDISTGRAD_HOST", ""),
        debug=_switch("JDISTGRAD_DEBUG", default=defaults.debug),
        debug_dir=os.environ.get("JDISTGRAD_DEBUG_DIR", ""),
    )


def _positive(variable: str, default: float, unit: str) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"the environment variable {variable} must be a positive number of {unit}, not {text!r}")
    return value


def _switch(variable: str, *, default: bool) -> bool:
    text = os.environ.get(variable, "1" if default else "0")
    if text not in ("0", "1"):
        raise ValueError(f"the environment variable {variable} must be 0 or 1, not {text!r}")
    return text == "1"


settings = _read()
