"""Machines that this one plays: each has its own name, network address, processes, shared memory and temporary files.

They are namespaces of Linux, joined by a bridge, so this takes root. All see the same disks.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType

NAMESPACES = ("--uts", "--ipc", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
BRIDGE, NETWORK = "machines", "10.77.0"

# $0 is the machine's name, $1 the file of all machines' names.
BEGINS = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && exec sleep infinity'


STANDARD = ("stdin", "stdout", "stderr")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


class Machine:
    """A machine, from now until ``close``."""

    def __init__(self, number: int, folder: pathlib.Path):
        self.name, self.address = f"machine{number}", f"{NETWORK}.{number}"
        self.files = folder / self.name
        self.files.mkdir()
        begin = ["sh", "-c", BEGINS, self.name, str(folder / "hosts")]
        self._unshared = subprocess.Popen(["unshare", *NAMESPACES, *begin])
        self.process = self._wait_for_process()
        run("ip", "link", "add", f"m{number}", "type", "veth", "peer", "name", "eth0", "netns", str(self.process))
        run("ip", "link", "set", f"m{number}", "master", BRIDGE, "up")
        for settings in (["addr", "add", f"{self.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            run(*self.command(["ip", *settings]))
        run(*self.command(["ip", "link", "set", "lo", "up"]))

    def _wait_for_process(self) -> int:
        """Return the first process of the machine, when it has come to its last command."""
        children = pathlib.Path(f"/proc/{self._unshared.pid}/task/{self._unshared.pid}/children")
        while self._unshared.poll() is None:
            for child in children.read_text().split():
                with contextlib.suppress(FileNotFoundError):
                    if pathlib.Path(f"/proc/{child}/comm").read_text() == "sleep\n":
                        return int(child)
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} did not start: status {self._unshared.returncode}")

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command there, in the present folder."""
        here = ["sh", "-c", 'cd "$0" && exec "$@"', str(pathlib.Path.cwd()), *command]
        return ["nsenter", "--target", str(self.process), "--all", "env", f"TMPDIR={self.files}", *here]

    def close(self) -> None:
        self._unshared.send_signal(signal.SIGKILL)  # and so ends all processes of the machine
        self._unshared.wait()


class Machines:
    """So many machines, which start what mpirun asks for by ``agent``.

    Attributes:
      socket: where the agent asks.
    """

    def __init__(self, count: int):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="machines-"))
        self._numbers = range(1, count + 1)
        names = "".join(f"{NETWORK}.{number} machine{number}\n" for number in self._numbers)
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self.socket = str(self._folder / "socket")
        self._asked = socket.socket(socket.AF_UNIX)
        self._asked.bind(self.socket)
        self._asked.listen(64)
        self.all: list[Machine] = []

    def __enter__(self) -> list[Machine]:
        try:
            run("ip", "link", "add", BRIDGE, "type", "bridge")
            run("ip", "link", "set", BRIDGE, "up")
            for number in self._numbers:
                self.all.append(Machine(number, self._folder))
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._serve, daemon=True).start()
        return self.all

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._asked.close()
        for machine in self.all:
            machine.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._asked.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._start, args=(asking,), daemon=True).start()

    def _start(self, asking: socket.socket) -> None:
        """Run a command on a machine, with the descriptors of the agent that asks, and tell it the status."""
        data, descriptors, *_ = socket.recv_fds(asking, 1 << 20, 3)
        name, command = json.loads(data)
        machine = next(one for one in self.all if one.name == name)
        began = subprocess.Popen(
            machine.command(["sh", "-c", command]), **dict(zip(STANDARD, descriptors, strict=True))
        )
        for descriptor in descriptors:
            os.close(descriptor)
        with asking, contextlib.suppress(OSError):  # mpirun does not wait for its agents
            asking.sendall(str(began.wait() % 256).encode())
