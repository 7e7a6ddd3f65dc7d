"""Settings that are not worth an argument: read once from the environment, each with its default."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Arguments:
    heartbeat_seconds: how often a silent worker that somebody waits for is asked for a sign of life.
    silence_seconds: after how long a silence it is given up.
    """

    heartbeat_seconds: float = 5.0
    silence_seconds: float = 60.0


def _read() -> Settings:
    defaults = Settings()
    return Settings(
        heartbeat_seconds=_seconds("JDISTGRAD_HEARTBEAT", defaults.heartbeat_seconds),
        silence_seconds=_seconds("JDISTGRAD_SILENCE", defaults.silence_seconds),
    )


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(f"the environment variable {variable} must be a positive number of seconds, not {text!r}")
    return value


settings = _read()
