"""The driver of a rank's steps, as its collectives need it."""

import dataclasses
import weakref

from jdistgrad.data_parallel.collectives.devices import Devices
from jdistgrad.data_parallel.collectives.host import HostCollectives
from jdistgrad.data_parallel.collectives.mpi_on_device import OnDevice
from jdistgrad.data_parallel.reducing.agreement import Settings
from jdistgrad.data_parallel.reducing.settings import Rules
from jdistgrad.data_parallel.steps.driver import Driver
from jdistgrad.data_parallel.steps.on_devices import DeviceDriver


def new_driver(collectives: HostCollectives, rules: Rules) -> Driver:
    return (
        DeviceDriver(collectives, rules) if isinstance(collectives, Devices | OnDevice) else Driver(collectives, rules)
    )


Drivers = weakref.WeakKeyDictionary[HostCollectives, dict[Settings, Driver]]

_of_no_world = Drivers()


def shared_driver(collectives: HostCollectives, rules: Rules, *, anew: bool = False) -> Driver:
    """Return the one driver for these collectives and settings here. Hooks of one name count as the same setting.

    Arguments:
      anew: if the ranks have come apart in its steps, begin with another one.
    """
    worker = collectives.keeper()
    drivers: Drivers = _of_no_world if worker is None else worker.kept.setdefault("drivers", Drivers())
    found = drivers.setdefault(collectives, {})
    if rules.settings not in found or (anew and found[rules.settings].refuses):
        found[rules.settings] = new_driver(collectives, dataclasses.replace(rules, timeout=collectives.timeout))
    return found[rules.settings]
